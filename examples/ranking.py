"""Top-K ranking: a recommender that cares for the top of the list.

500 users have rated some of 300 films (generated, so that the example needs no download). A block
is a user; its lower variables are the threshold of the user's top K and the ranks of the user's
films; x is a matrix factorisation. `TopKRecommender` holds out each user's last films to choose the
number of epochs. The picture shows NDCG@10 on films that no training saw, beside a softmax loss,
which knows no top, and beside the most popular films, which know no user.
"""

import argparse

import numpy as np

from bilevax.applications.ranking import TopKRecommender
from bilevax.data import generate
from bilevax.experiments import figures

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="few users and epochs, to try it out")
parser.add_argument("--picture", default="ranking.png", help="where the picture goes")
options = parser.parse_args()
figures.use_style()
USERS, ITEMS, EPOCHS = (60, 60, 2) if options.quick else (500, 300, 60)


def test_ndcg(recommended, liked):  # of one user: films in order, and the ratings of those that were held out
    gains = [(2 ** liked.get(film, 0) - 1) / np.log2(place + 2) for place, film in enumerate(recommended)]
    best = sorted(liked.values(), reverse=True)[: len(recommended)]
    return sum(gains) / sum((2**rating - 1) / np.log2(place + 2) for place, rating in enumerate(best))


# The last five films of every user are held out; nobody sees them before the test.
table = generate.interactions(USERS, ITEMS, 20 * USERS if options.quick else 60 * USERS, seed=0).table
order = np.lexsort((table.time, table.user))
from_the_end = np.empty(len(table), int)
for user in range(USERS):
    own = order[table.user[order] == user]
    from_the_end[own] = np.arange(len(own))[::-1]
late = from_the_end < 5
train = {name: getattr(table, name)[~late] for name in ("user", "item", "rating", "time")}

popular = np.argsort(-np.bincount(train["item"], minlength=ITEMS)).tolist()
models = {name: TopKRecommender(name, epochs=EPOCHS).fit(train) for name in ("softmax", "k-song")}
scores = {"most popular": [], "softmax": [], "k-song": []}
for user in np.unique(train["user"]):
    held = late & (table.user == user)
    liked = dict(zip(table.item[held].tolist(), table.rating[held].tolist(), strict=True))
    seen = set(train["item"][train["user"] == user].tolist())
    lists = {name: [film for film, _ in model.recommend(user, 10)] for name, model in models.items()}
    lists["most popular"] = [film for film in popular if film not in seen][:10]
    for name, films in lists.items():
        scores[name].append(test_ndcg(films, liked))
means = {name: np.mean(values) for name, values in scores.items()}
errors = [np.std(values) / len(values) ** 0.5 for values in scores.values()]
print({name: round(float(value), 4) for name, value in means.items()})

figure, ((axis,),) = figures.panels(1, 1, width=4.5, height=2.2)
axis.barh(list(means), list(means.values()), xerr=errors, color=["#888888", "#44AA99", "#0072B2"])
axis.set(xlabel="test NDCG@10, mean over users ± standard error")
figure.savefig(options.picture, dpi=150)
