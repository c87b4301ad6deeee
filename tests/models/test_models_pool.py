"""The pool of an experiment: who brings what, keys, sizes without memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from potluck.core.task import Task
from potluck.errors import ConfigError, ModelError
from potluck.models import ModelPool, build, register, registry
from potluck.models import pool as pool_module

DIGITS = Task("classification", 10, (1, 8, 8))
CIFAR10 = Task("classification", 10, (3, 32, 32))
NEWS = Task("text-classification", 3, (9,), vocabulary=20)
CNNS = [f"cnn{i}" for i in range(1, 6)]
RESNETS = [f"resnet{i}" for i in (10, 14, 18, 22, 26)]


class Net(nn.Sequential):
    def __init__(self, width=5):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def keys(pool, total):
    return [pool.key(i, str(i), total) for i in range(total)]


def test_cycle_gives_client_i_entry_i_modulo_length():
    assert keys(ModelPool(CNNS), 12) == [f"cnn{i % 5 + 1}" for i in range(12)]


def test_blocks_give_each_fifth_one_depth():
    found = keys(ModelPool(RESNETS, order="blocks"), 100)
    assert found == [name for name in RESNETS for _ in range(20)]


@settings(deadline=None)
@given(entries=st.integers(1, 8), total=st.integers(1, 60))
def test_blocks_are_even_and_in_order(entries, total):
    names = [f"{'mlp' if i % 2 else 'conv'}-{'small' if i % 4 < 2 else 'large'}" for i in range(entries)]
    pool = ModelPool([{"name": name, "rep_dim": i + 1} for i, name in enumerate(names)], order="blocks")
    found = [pool.keys.index(key) for key in keys(pool, total)]
    counts = [found.count(place) for place in range(entries)]
    assert found == sorted(found)
    assert max(counts) - min(counts) <= 1


def test_mapping_from_client_to_entry():
    pool = ModelPool({"a": "mlp-small", 2: "conv-small", "c": "mlp-small"})
    assert [pool.key(0, client, 3) for client in ("a", "2", "c")] == ["mlp-small", "conv-small", "mlp-small"]
    assert pool.keys == ("mlp-small", "conv-small")
    pool.cover(["a", "2", "c"])
    with pytest.raises(ConfigError, match="leaves out clients d, e; give each client a model"):
        pool.cover(["a", "2", "c", "d", "e"])
    with pytest.raises(ConfigError, match="leaves out clients 3, 4, 5, 6, 7 and 5 more"):
        pool.cover([*"a2c", *map(str, range(3, 13))])
    with pytest.raises(ConfigError, match="names client c, which does not exist"):
        pool.cover(["a", "2"])
    with pytest.raises(ConfigError, match="client z: it has no model; name it"):
        pool.entry(0, "z", 3)


def test_keys_name_architectures_once():
    net = Net()
    first, second = (lambda: Net(3)), (lambda: Net(4))
    entries = [
        "resnet18",
        {"name": "resnet18", "stem": "cifar", "rep_dim": 64},
        {"rep_dim": 64, "stem": "cifar", "name": "resnet18"},
        {"name": "resnet18"},
        Net,
        net,
        Net,
        {"model": Net, "width": 7},
        first,
        second,
    ]
    pool = ModelPool(entries)
    wide = "resnet18(rep_dim=64,stem=cifar)"
    assert keys(pool, 10) == [
        "resnet18", wide, wide, "resnet18", "callable-4:Net", "module-5:Net", "callable-4:Net",
        "callable-4:Net(width=7)", "callable-8:<lambda>", "callable-9:<lambda>",
    ]  # fmt: skip
    assert pool.entry(5, "5", 10) is net
    assert pool.build("callable-9:<lambda>", DIGITS).rep_dim == 4


def test_options_that_only_read_alike_get_their_own_keys():
    def make(width):
        return Net(width())

    pool = ModelPool([{"model": make, "width": lambda: 3}, {"model": make, "width": lambda: 4}])
    assert [pool.build(key, DIGITS).rep_dim for key in keys(pool, 2)] == [3, 4]


def test_labels_are_short_where_they_are_clear():
    pool = ModelPool(["cnn1", "resnet18", {"name": "resnet18", "stem": "cifar"}, Net])
    assert [pool.label(i, str(i), 4) for i in range(4)] == ["cnn1", "resnet18", "resnet18(stem=cifar)", "Net"]


def test_one_entry_for_all():
    for entries in ("mlp-small", {"name": "mlp-small"}, ["mlp-small"]):
        assert keys(ModelPool(entries), 3) == ["mlp-small"] * 3
    assert ModelPool(Net).keys == ("callable-0:Net",)


def test_a_named_pool_is_the_list_of_its_models():
    assert keys(ModelPool("cnn"), 6) == [*CNNS, "cnn1"]
    assert keys(ModelPool("resnet", order="blocks"), 5) == RESNETS
    assert len(keys(ModelPool("htm10"), 10)) == len(set(keys(ModelPool("htm10"), 20))) == 10
    assert ModelPool(["cnn", "mlp-small"]).keys == (*CNNS, "mlp-small")


def test_options_beside_a_pool_are_for_each_of_its_models():
    pool = ModelPool({"name": "htm10", "rep_dim": 512, "adapter": "pool"})
    assert pool.keys[0] == "fedavg-cnn(adapter=pool,rep_dim=512)"
    heads = {pool.signature(key, CIFAR10)["head.weight"] for key in pool.keys}
    assert heads == {(10, 512)}
    assert list(pool.labels.values())[:2] == ["fedavg-cnn", "googlenet"]


def test_a_model_goes_before_a_pool_of_that_name(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    register("resnet")(Net)
    assert ModelPool("resnet").keys == ("resnet",)


def test_width_of_call_before_entry_before_pool():
    pool = ModelPool(["mlp-small", {"name": "mlp-large", "rep_dim": 9}, Net], rep_dim=16)
    assert [pool.build(key, DIGITS).rep_dim for key in pool.keys] == [16, 9, 16]
    assert [pool.build(key, DIGITS, 4).rep_dim for key in pool.keys] == [4, 4, 4]
    assert pool.build("conv-small", DIGITS).rep_dim == 16
    assert pool.build({"name": "conv-small", "rep_dim": 3}, DIGITS).rep_dim == 3


@pytest.mark.parametrize("entry", ["conv-large", "resnet10", {"name": "resnet10", "rep_dim": 8}, Net, Net()])
def test_outline_is_that_of_the_built_model(entry):
    pool = ModelPool([entry])
    (key,) = pool.keys
    random_state = torch.get_rng_state()
    signature, size = pool.signature(key, DIGITS), pool.parameters(key, DIGITS)
    assert torch.equal(torch.get_rng_state(), random_state)
    model = build(entry, DIGITS)
    assert signature == {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert size == sum(p.numel() for p in model.parameters())


def test_outlines_of_named_models_take_no_memory_and_are_kept(monkeypatch):
    devices = []
    real = pool_module.build

    def spy(*arguments, **options):
        model = real(*arguments, **options)
        devices.append(next(model.parameters()).device.type)
        return model

    monkeypatch.setattr(pool_module, "build", spy)
    pool = ModelPool(["resnet26", Net])
    for _ in range(2):
        assert pool.smallest(DIGITS) == "callable-1:Net"
    assert devices == ["meta", "cpu"]
    pool.signature("resnet26", DIGITS, 64)
    assert devices == ["meta", "cpu", "meta"]


def test_later_models_of_a_key_are_not_tried_again(monkeypatch):
    checks = []
    real = pool_module.build
    monkeypatch.setattr(pool_module, "build", lambda *a, **k: checks.append(k["check"]) or real(*a, **k))
    pool = ModelPool([Net])
    first, second = (pool.build(pool.keys[0], DIGITS) for _ in range(2))
    assert checks == [True, False]
    assert [n for n, _ in first.named_parameters()] == [n for n, _ in second.named_parameters()]


def test_smallest_looks_only_at_models_that_fit():
    pool = ModelPool(["cnn1", "conv-large", "mlp-small", "conv-small", "text-mean"])
    assert pool.smallest(DIGITS) == "mlp-small"
    assert pool.largest(DIGITS) == "conv-large"
    assert pool.smallest(NEWS) == "text-mean"
    with pytest.raises(ModelError, match="cnn1 takes images of 16×16 or larger"):
        ModelPool(["cnn1", "cnn2"]).smallest(DIGITS)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (([],), ConfigError, "the model pool is empty"),
        ((["cnn1", "cnn9"],), ModelError, "the model pool: unknown model 'cnn9'; did you mean"),
        (("htm11",), ModelError, "the model pool: unknown model 'htm11'; did you mean 'htm10'"),
        (({"0": "cnn"},), ModelError, "the model pool: 'cnn' is a pool, one model is needed here: cnn1, "),
        (({"0": "cnn1", 0: "cnn2"},), ConfigError, "names a client twice"),
        ((["cnn1"], 0), ModelError, "the model pool: rep_dim is 0"),
        (
            (["cnn1", 5],),
            ModelError,
            "the model pool: a model is a name, a mapping, a callable or a module, not 5",
        ),
    ],
)
def test_bad_pools(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        ModelPool(*arguments)


def test_bad_questions():
    with pytest.raises(ConfigError, match="unknown order 'cycles' of models; did you mean 'cycle'"):
        ModelPool(["cnn1"], order="cycles")
    with pytest.raises(ModelError, match="unknown key 'cnn2' of the model pool"):
        ModelPool(["cnn1"]).signature("cnn2", DIGITS)
    with pytest.raises(ConfigError, match="client 9: its index 9 is not below the total of 9"):
        ModelPool(["cnn1"]).key(9, "9", 9)
