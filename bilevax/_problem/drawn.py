"""Products with drawn rows, which an accelerator computes where it draws them.

A step multiplies the rows that it draws with a few vectors per block, and their transposed with as many
coefficients. An accelerator does that fastest in kernels that fetch the rows by themselves
(`row_kernels.py`): drawn rows then never go through its memory. But f and g are given plain arrays of rows,
and pass them to `bilevax.dot`. So whoever draws rows notes where they come from (`note_origin`), and a
product asks. Where that is not known, or the rows are few, it is a plain sum.

Under a `vmap` over blocks, `product` sees one block's rows; the array that was drawn is seen by its
batching rule alone. So it is a primitive. Its batching rule turns it into a product of drawn rows with k
vectors per block, of which there are two, each the other's transposed; a further `vmap` over vectors or
runs adds to k or to the blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from bilevax._problem import row_kernels
from bilevax._problem.row_kernels import Drawn


class _Noted(NamedTuple):
    rows: weakref.ref[Any]
    origin: Drawn


_noted: dict[int, _Noted] = {}


def note_origin(rows: Array, stored: Array, index: Array) -> None:
    """Notes that `rows`, (blocks, batch, width), are the stored ones with these numbers, while they exist."""
    place = id(rows)
    _noted[place] = _Noted(
        weakref.ref(rows, lambda _: _noted.pop(place, None)), Drawn(stored, index, rows.shape[-1])
    )


def _origin_of(rows: Any) -> Drawn | None:
    found = _noted.get(id(rows))
    return found.origin if found is not None and found.rows() is rows else None


# ---- one block's rows times a vector


def product(rows: Array, vector: Array) -> Array:
    """Rows (n, d) times a vector."""
    return _product.bind(rows, vector)


def _summed(rows: Array, vector: Array) -> Array:
    """A plain sum, which the compiler merges with the drawing of the rows."""
    return jnp.sum(rows * vector[..., None, :], axis=-1)


_product = Primitive("product_with_rows")
_product.def_impl(jax.jit(_summed))
mlir.register_lowering(_product, mlir.lower_fun(_summed, multiple_results=False))


@_product.def_abstract_eval
def _product_shape(rows: Any, vector: Any) -> Any:
    return ShapedArray(rows.shape[:1], jnp.result_type(rows.dtype, vector.dtype))


def _product_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Array, Any]:
    (rows, vector), (of_rows, of_vector) = primals, tangents
    parts = []
    if not isinstance(of_vector, ad.Zero):
        parts.append(product(rows, of_vector))
    if not isinstance(of_rows, ad.Zero):
        parts.append(_summed(of_rows, vector))
    out = product(rows, vector)
    return out, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(out)


def _product_transposed(cotangent: Any, rows: Any, vector: Any) -> tuple[None, Any]:
    if isinstance(cotangent, ad.Zero):
        return None, ad.Zero(vector.aval)
    return None, jnp.sum(rows * cotangent[:, None], axis=0)


def _product_batched(given: Sequence[Any], axes: Sequence[Any]) -> tuple[Array, int]:
    (rows, vector), (of_rows, of_vector) = given, axes
    origin = _origin_of(rows)
    known = origin is not None and rows.dtype == vector.dtype and row_kernels.many(origin, rows.dtype)
    if origin is None or not known or of_rows != 0 or of_vector is None:
        rows, vector = (
            array if axis is None else jnp.moveaxis(array, axis, 0)
            for array, axis in ((rows, of_rows), (vector, of_vector))
        )
        return _summed(rows, vector), 0
    vectors = jnp.moveaxis(vector, of_vector, 0)[:, None]
    return _forward.bind(origin.stored, origin.index, vectors, width=origin.width)[:, 0], 0


ad.primitive_jvps[_product] = _product_jvp
ad.primitive_transposes[_product] = _product_transposed
batching.primitive_batchers[_product] = _product_batched


# ---- drawn rows times k vectors of their blocks, (blocks, k, width) → (blocks, k, batch), and transposed


def _plain(stored: Array, index: Array, vectors: Array, *, width: int) -> Array:
    return row_kernels.plain(Drawn(stored, index, width), vectors)


def _plain_transposed(stored: Array, index: Array, coefficients: Array, *, width: int) -> Array:
    return row_kernels.plain_transposed(Drawn(stored, index, width), coefficients)


def _fast(stored: Array, index: Array, vectors: Array, *, width: int) -> Array:
    return row_kernels.forward(Drawn(stored, index, width), vectors)


def _fast_transposed(stored: Array, index: Array, coefficients: Array, *, width: int) -> Array:
    return row_kernels.transposed(Drawn(stored, index, width), coefficients)


def _linear(name: str, length: Callable[..., int], plain: Callable[..., Array], fast: Any) -> Primitive:
    """A product that is linear in its last argument; `length` is that of the last axis of its result."""
    made = Primitive(name)
    made.def_impl(jax.jit(plain, static_argnames="width"))
    mlir.register_lowering(made, mlir.lower_fun(plain, multiple_results=False))
    mlir.register_lowering(made, mlir.lower_fun(fast, multiple_results=False), platform="cuda")

    @made.def_abstract_eval
    def _(stored: Any, index: Any, given: Any, *, width: int) -> Any:
        return ShapedArray((*given.shape[:2], length(index, width)), given.dtype)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, width: int) -> tuple[Array, Any]:
        stored, index, given = primals
        out, parts = made.bind(*primals, width=width), []
        if not isinstance(tangents[2], ad.Zero):
            parts.append(made.bind(stored, index, tangents[2], width=width))
        if not isinstance(tangents[0], ad.Zero) and tangents[0].dtype == given.dtype:
            parts.append(plain(tangents[0], index, given, width=width))
        return out, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(out)

    def batched(given: Sequence[Any], axes: Sequence[Any], *, width: int) -> tuple[Array, int]:
        stored, index, last = given
        of_stored, of_index, of_last = axes
        if of_stored is not None:
            return jax.vmap(lambda *one: plain(*one, width=width), in_axes=tuple(axes))(*given), 0
        if of_index is None:
            many = jnp.moveaxis(last, of_last, 1)
            shape = many.shape
            out = made.bind(stored, index, many.reshape(shape[0], -1, shape[-1]), width=width)
            return out.reshape(*shape[:3], -1), 1
        index = jnp.moveaxis(index, of_index, 0)
        runs, blocks, batch = index.shape
        last = (
            jnp.broadcast_to(last, (runs, *last.shape)) if of_last is None else jnp.moveaxis(last, of_last, 0)
        )
        out = made.bind(
            stored, index.reshape(-1, batch), last.reshape(runs * blocks, *last.shape[2:]), width=width
        )
        return out.reshape(runs, blocks, *out.shape[1:]), 0

    ad.primitive_jvps[made] = jvp
    batching.primitive_batchers[made] = batched
    return made


def _are_transposed(one: Primitive, other: Primitive) -> None:
    def rule(cotangent: Any, stored: Any, index: Any, given: Any, *, width: int) -> tuple[None, None, Any]:
        if isinstance(cotangent, ad.Zero):
            return None, None, ad.Zero(given.aval)
        return None, None, other.bind(stored, index, cotangent, width=width)

    ad.primitive_transposes[one] = rule


_forward = _linear("product_with_drawn_rows", lambda index, width: index.shape[1], _plain, _fast)
_backward = _linear(
    "transposed_product_with_drawn_rows", lambda index, width: width, _plain_transposed, _fast_transposed
)
_are_transposed(_forward, _backward)
_are_transposed(_backward, _forward)
