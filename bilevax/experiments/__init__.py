"""The paper's experiments, one file each; `bilevax reproduce` runs them."""
