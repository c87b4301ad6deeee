"""Models through transformers and peft: contract, what is trained, weights from a folder, sentences."""

import importlib
import importlib.util
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.data import DataConfig, from_arrays, load
from potluck.errors import DataError, ModelError
from potluck.experiment.schema import Experiment
from potluck.kit.representation_model import representation_model
from potluck.models import ModelPool, build
from potluck.models.hugging_face import network_settings
from potluck.models.zoo import hf
from potluck.runs.api import run
from potluck.testing.bench import Bench, Played
from potluck.testing.contract import a_captured_step_is_right
from potluck.testing.cpu_capture import _Recorder

CIFAR10 = Task("classification", 10, (3, 32, 32))
FASHION = Task("classification", 10, (1, 28, 28))
SEGMENTS = Task("segmentation", 11, (1, 16, 16))
STREETS = Task("segmentation", 4, (3, 40, 65))
NEWS = Task("text-classification", 20, (12,), vocabulary=50)

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TINY = {
    "hf-vit": SMALL | {"patch_size": 8},
    "hf-segformer": {
        "hidden_sizes": [4, 8, 12, 16],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 8,
    },
    "hf-bert": SMALL,
    "hf-distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
}
CASES = [(name, task) for name in ("hf-vit", "hf-segformer") for task in (CIFAR10, FASHION)]
CASES += [("hf-segformer", SEGMENTS), ("hf-segformer", STREETS), ("hf-bert", NEWS), ("hf-distilbert", NEWS)]

installed = all(importlib.util.find_spec(name) for name in ("transformers", "peft"))
needs_extra = pytest.mark.skipif(not installed, reason="the extra [transformers] is not installed")


def tiny(name, task, rep_dim=None, **options):
    with Rng(0).as_default():
        return build({"name": name, "config": TINY[name], **options}, task, rep_dim)


def inputs(task, samples=3):
    if task.vocabulary:
        return torch.randint(1, task.vocabulary, (samples, *task.input), generator=Rng(1).generator())
    return torch.randn(samples, *task.input, generator=Rng(1).generator())


def few(rows):
    data = load("digits-segments")
    return replace(data, x=data.x[:rows], y=data.y[:rows], strata=data.strata[:rows], train_rows=rows)


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_the_extra_is_imported_only_when_a_model_is_built(monkeypatch):
    for name in ("transformers", "peft"):
        monkeypatch.setitem(sys.modules, name, None)
    importlib.reload(hf)
    with pytest.raises(ModelError, match=r"need the package transformers: pip install .*\[transformers\]"):
        build("hf-vit", CIFAR10)


class Settings:
    """What the library has of a family: numbers, words, and names of code that it fetches from the hub."""

    hidden_size, hidden_act, per_layer_config = 16, "gelu", None
    dtype = _attn_implementation = _experts_implementation = None

    def __init__(self, **settings):
        vars(self).update(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_attn_implementation", "kernels-community/attention"),
        ("_attn_implementation", "flash_attention_2"),
        ("_experts_implementation", "somebody/experts"),
        ("hidden_act", "somebody/kernel"),
        ("hidden_act", ["gelu"]),
        ("dtype", "somebody/type"),
        ("per_layer_config", {0: {"_attn_implementation": "somebody/kernel"}}),
        ("hidden_size", ["somebody/kernel"]),
        (3, 4),
    ],
)
def test_no_setting_names_code_of_the_hub(name, value, monkeypatch):
    auto = SimpleNamespace(for_model=lambda family, **settings: Settings(**settings))
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoConfig=auto))
    known = {"hidden_size": 8, "hidden_act": "gelu_new"}
    assert vars(network_settings("vit", None, known)) == known
    with pytest.raises(ModelError, match=f"config: .*{name}.*; (leave it out|give a value such as)"):
        network_settings("vit", None, {name: value})


@needs_extra
def test_no_weights_name_code_of_the_hub(tmp_path):
    tiny("hf-vit", CIFAR10, lora=0).network.save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | {"_attn_implementation": "some/kernel"}))
    assert network_settings("vit", str(tmp_path), None)._attn_implementation is None
    assert build({"name": "hf-vit", "weights": str(tmp_path)}, CIFAR10).network.config._attn_implementation


@needs_extra
@pytest.mark.parametrize(("name", "task"), CASES)
@pytest.mark.parametrize("rep_dim", [None, 6])
def test_contract_and_what_is_trained(name, task, rep_dim):
    model = tiny(name, task, rep_dim)
    x = inputs(task)
    assert model.features(x).shape == (3, rep_dim or 16)
    assert model(x).shape == (3, *task.scores)
    own = {name for name, _ in model.named_parameters() if name.startswith(("head.", "resize."))}
    assert bool({"resize.weight", "resize.bias"} & own) == bool(rep_dim)
    lora = trained(model) - own
    assert own < trained(model)
    assert lora
    assert all(".lora_A." in key or ".lora_B." in key for key in lora)
    assert all(
        part.shape[0 if "lora_A" in key else 1] == 16 for key, part in model.named_parameters() if key in lora
    )
    model(x).square().sum().backward()
    assert {key for key, part in model.named_parameters() if part.grad is not None} == trained(model)


@needs_extra
def test_lora_starts_as_the_network_itself_and_can_be_left_out():
    x = inputs(CIFAR10)
    plain, with_lora = tiny("hf-vit", CIFAR10, lora=0), tiny("hf-vit", CIFAR10, lora=4)
    assert trained(plain) == {name for name, _ in plain.named_parameters()}
    torch.testing.assert_close(plain.eval().features(x), with_lora.eval().features(x))


@needs_extra
@pytest.mark.parametrize("name", ["hf-bert", "hf-distilbert"])
def test_padding_changes_nothing(name):
    model = tiny(name, NEWS).eval()
    x = inputs(NEWS)
    x[:, 7:] = 0
    short = tiny(name, Task("text-classification", 20, (7,), vocabulary=50)).eval()
    torch.testing.assert_close(model(x), short(x[:, :7]), rtol=1e-4, atol=1e-5)
    assert bool(model(torch.zeros_like(x)).isfinite().all())
    with torch.autocast("cpu", torch.bfloat16):
        assert bool(model(torch.zeros_like(x)).isfinite().all())


@needs_extra
@pytest.mark.parametrize(("name", "task"), CASES)
def test_a_step_reads_nothing_back(name, task):
    model, x = tiny(name, task), inputs(task)
    with _Recorder(name):
        model(x).square().sum().backward()


@needs_extra
@pytest.mark.parametrize(
    ("name", "task"), [("hf-vit", CIFAR10), ("hf-segformer", SEGMENTS), ("hf-bert", NEWS)]
)
def test_weights_from_a_folder(name, task, tmp_path):
    source = tiny(name, task, lora=0).eval()
    source.network.save_pretrained(tmp_path)
    with Rng(9).as_default():
        model = build({"name": name, "weights": str(tmp_path)}, task).eval()
    torch.testing.assert_close(model.features(inputs(task)), source.features(inputs(task)))
    assert any("lora_A" in key for key in trained(model))
    pool = ModelPool({"name": name, "weights": str(tmp_path)})
    assert pool.parameters(pool.keys[0], task) == sum(part.numel() for part in model.parameters())


@needs_extra
def test_images_are_brought_to_the_size_of_the_weights(tmp_path):
    tiny("hf-vit", CIFAR10, lora=0).network.save_pretrained(tmp_path)
    model = build({"name": "hf-vit", "weights": str(tmp_path)}, FASHION)
    assert model.size == (32, 32)
    assert model(inputs(FASHION)).shape == (3, 10)


@needs_extra
def test_pixels_are_scored_as_by_the_library(tmp_path):
    """Its own segmenter on the same weights, where ours does not look at the representation."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(**TINY["hf-segformer"], num_labels=4, initializer_range=0.5)
    with Rng(4).as_default():
        theirs = SegformerForSemanticSegmentation(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = build({"name": "hf-segformer", "weights": str(tmp_path)}, STREETS).eval()
    head, decoder = ours.head, theirs.decode_head
    [projections] = [part for part in decoder.children() if isinstance(part, nn.ModuleList)]
    with torch.no_grad():
        for level, projection in zip(head.levels, projections, strict=False):
            level.weight.copy_(projection.proj.weight[:, :, None, None])
            projection.proj.bias.zero_()  # batch norm takes it away again: ours has none
        mixed = decoder.linear_fuse.weight.split(8, 1)[::-1]
        head.mix.weight.copy_(torch.cat([*mixed, torch.zeros_like(mixed[0])], 1))
        head.classify.load_state_dict(decoder.classifier.state_dict())
        x = inputs(STREETS)
        coarse = theirs(pixel_values=nn.functional.interpolate(x, (64, 96), mode="bilinear")).logits
        expected = nn.functional.interpolate(coarse, (40, 65), mode="bilinear")
        assert expected.std() > 0.01
        torch.testing.assert_close(ours(x), expected)


@needs_extra
def test_the_head_of_pixels_reads_the_representation():
    model = tiny("hf-segformer", SEGMENTS, 6).eval()
    assert representation_model(model) == ["model/network", "model/resize"]
    x = inputs(SEGMENTS)
    before, features = model(x), model.features(x)
    with torch.no_grad():
        model.resize.bias += 1
    torch.testing.assert_close(model.features(x), features + 1)
    assert (model(x) - before).abs().amax((1, 2, 3)).min() > 1e-3


@needs_extra
def test_steps_on_pixels_can_be_captured():
    """Stochastic depth, dropout and batch norm; the last client has a single sample."""
    model = {"name": "hf-segformer", "config": TINY["hf-segformer"]}
    pool = {"0": model, "1": "conv-dense", "2": model | {"lora": 0}, "3": model}
    method = {"name": "fedmuscle", "batch": 20, "peers": 2}
    training = {"batch_size": 4, "optimizer": {"lr": 1e-3}}
    bench = Bench(method, models={"pool": pool, "rep_dim": 8}, training=training)
    bench.data = few(60)
    a_captured_step_is_right(bench)


@needs_extra
@pytest.mark.parametrize("method", ["local", {"name": "fedmuscle", "batch": 8, "peers": 1}])
def test_a_federation_that_segments(method, tmp_path):
    experiment = Experiment.make(
        data=few(40),
        partition={"kind": "iid", "clients": 2, "test": 0.3},
        models={
            "pool": [{"name": "hf-segformer", "config": TINY["hf-segformer"]}, "conv-dense"],
            "rep_dim": 8,
        },
        public={"data": "digits", "samples": 16},
        method=method,
        training={"rounds": 2, "batch_size": 8, "optimizer": {"lr": 0.05}},
        engine={"device": "cpu", "workers": 1},
    )
    lines = (run(experiment, out=tmp_path / "run").folder / "metrics.jsonl").read_text().splitlines()
    scored = {
        (line["client"], line["test"]["metric"]) for line in map(json.loads, lines) if line["round"] == 2
    }
    assert scored == {("0", "mean_iou"), ("1", "mean_iou")}
    federation = experiment.build()
    model, game = federation.population.build_model("0"), Played(federation)
    assert not game.round(("0", "1")).failures
    state = game.client("0")
    moved = {
        name for name, value in model.named_parameters() if not torch.equal(state[f"model/{name}"], value)
    }
    assert moved <= trained(model)
    assert {name.partition(".")[0] for name in moved} == {"network", "resize", "head"}


@needs_extra
def test_a_folder_that_is_missing_may_be_a_repository_which_is_asked_once(monkeypatch):
    import huggingface_hub

    asked = []

    def info(self, repository, **options):
        asked.append(repository)
        raise OSError("nobody answers\nmore of it")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits to ask again"))
    told = (
        r"no folder nowhere/nothing here, and it cannot .* from the hub \(nobody answers\); check the name$"
    )
    with pytest.raises(ModelError, match=told):
        build({"name": "hf-vit", "weights": "nowhere/nothing"}, CIFAR10)
    assert asked == ["nowhere/nothing"]
    with pytest.raises(DataError, match="data set 'digits-captions', tokenizer: there is " + told):
        load("digits-captions", tokenizer="nowhere/nothing")


VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "digit",
    "num",
    "##ber",
    "a",
    "zero",
    "one",
    "film",
]


@pytest.fixture
def pretrained(tmp_path):
    """The folder of a tiny BERT with its tokenizer."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(VOCABULARY)}
    made = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = tmp_path / "folders" / "bert"
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    task = Task("text-classification", 2, (12,), vocabulary=len(VOCABULARY))
    tiny("hf-bert", task, lora=0).network.save_pretrained(folder)
    return folder


def news(folder, tmp_path):
    """A few labelled texts in the layout of SST-2."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = ["a film", "The number ONE film", "", "zero " * 30] * 10
    (tmp_path / "shelf" / "sst2").mkdir(parents=True)
    table = pa.table({"sentence": texts, "label": [0, 1] * 20})
    for split in ("train", "validation"):
        pq.write_table(table, tmp_path / "shelf" / "sst2" / f"{split}-00000-of-00001.parquet")
    return {"name": "sst2", "dir": "shelf", "length": 12, "tokenizer": folder}


@needs_extra
def test_texts_and_captions_through_a_tokenizer(pretrained, tmp_path):
    data = DataConfig(**news("folders/bert", tmp_path)).load(tmp_path)
    assert data.task == Task("text-classification", 2, (12,), vocabulary=len(VOCABULARY))
    assert data.x[:3].tolist() == [
        [2, 9, 12, 3] + [0] * 8,
        [2, 5, 7, 8, 11, 12, 3] + [0] * 5,
        [2, 3] + [0] * 10,
    ]
    assert data.x[3].tolist() == [2] + [10] * 10 + [3]
    pairs = load("digits-captions", tokenizer=str(pretrained))
    row = pairs.texts.index("the digit zero")
    assert pairs.task.vocabulary == len(VOCABULARY)
    assert pairs.x[row, 64:].tolist() == [2, 5, 6, 10, 3] + [0] * 11
    short = load("digits-captions", tokenizer=str(pretrained), length=5)
    assert short.x.shape[1] == 64 + 5
    with pytest.raises(DataError, match="a length of 2 leaves no room beside the 2 special tokens"):
        load("digits-captions", tokenizer=str(pretrained), length=2)
    with pytest.raises(DataError, match="the tokenizer has a vocabulary of its own: leave out vocabulary"):
        DataConfig(**news(str(pretrained), tmp_path / "third") | {"vocabulary": 9}).load(tmp_path / "third")
    with pytest.raises(DataError, match="data set 'sst2', tokenizer: there is no folder"):
        DataConfig(**news("./folders/none", tmp_path / "fourth")).load(tmp_path / "fourth")


@needs_extra
@pytest.mark.parametrize("workers", [1, 2])
def test_a_pretrained_text_model_meets_images_on_captions(workers, pretrained, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("POTLUCK_DATA", "")
    cut = {"kind": "iid", "clients": 1, "test": 0.3}
    values = {
        "federation": [
            {
                "data": news("folders/bert", tmp_path),
                "partition": cut,
                "models": {"name": "hf-bert", "weights": str(pretrained)},
            },
            {"data": {"name": "digits", "samples": 60}, "partition": cut, "models": "conv-small"},
            {
                "data": {"name": "digits-captions", "samples": 60, "tokenizer": "folders/bert"},
                "partition": cut,
                "models": "dual-small",
            },
        ],
        "models": {"rep_dim": 8},
        "public": {"data": "digits-captions", "samples": 16},
        "method": {"name": "fedmuscle", "peers": 2, "batch": 8},
        "training": {"rounds": 1, "batch_size": 8},
        "engine": {"device": "cpu", "workers": workers},
    }
    (tmp_path / "mixed.yaml").write_text(json.dumps(values))
    experiment = Experiment.load(tmp_path / "mixed.yaml")
    federation = experiment.build()
    view, pairs = federation.population.public("0"), federation.population.public("2")
    captions = [load("digits-captions").texts[row] for row in view.ids]
    ids, _ = hf.tokenize(str(pretrained), captions, 12)
    assert view.mask.all()
    assert torch.equal(view.source.x, ids)
    assert torch.equal(pairs.source.x[:, 64:76].long(), hf.tokenize(str(pretrained), captions, 16)[0][:, :12])
    result = run(experiment, out=tmp_path / "run")
    written = Experiment.load(result.folder / "config.yaml")
    assert written.federation[0].data.tokenizer == str(pretrained)
    assert "fork" not in capfd.readouterr().err


@needs_extra
def test_token_ids_from_python_can_join(pretrained):
    ids, tokenizer = hf.tokenize(str(pretrained), ["a film", "the number one"] * 20, 6)
    data = from_arrays(ids, [0, 1] * 20, vocabulary=tokenizer, name="films")
    cut = {"kind": "iid", "clients": 1}
    federation = Experiment.make(
        federation=[
            {"data": data, "partition": cut, "models": {"name": "hf-bert", "weights": str(pretrained)}},
            {"data": few(40), "partition": cut, "models": "conv-dense"},
        ],
        models={"rep_dim": 8},
        public={"data": "digits-captions", "samples": 16},
        method={"name": "fedmuscle", "peers": 1, "batch": 8},
        engine={"device": "cpu", "workers": 1},
    ).build()
    assert not Played(federation).round(("0", "1")).failures
    assert federation.population.public("0").source.x[:, 0].tolist() == [2] * 16


@needs_extra
def test_the_tokenizer_of_a_folder(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    ids, vocabulary = hf.tokenize(str(tmp_path), ["good film", "unheard of bad film film film"], 5)
    assert vocabulary.vocabulary == 8
    assert ids.tolist() == [[2, 5, 7, 3, 0], [2, 1, 1, 6, 3]]


@needs_extra
def test_bad_input_is_one_sentence(tmp_path):
    weights = tmp_path / "bert"
    tiny("hf-bert", NEWS, lora=0).network.save_pretrained(weights)
    (tmp_path / "empty").mkdir()
    other = Task("text-classification", 20, (12,), vocabulary=99)
    for entry, task, sentence in [
        ({"name": "hf-bert", "weights": str(tmp_path / "none")}, NEWS, "there is no folder"),
        ({"name": "hf-bert", "weights": str(tmp_path / "empty")}, NEWS, "has no config.json"),
        ({"name": "hf-bert", "weights": str(weights)}, other, "know 50 token ids, the task has 99"),
        ({"name": "hf-segformer", "weights": str(tmp_path / "none")}, SEGMENTS, "there is no folder"),
        (
            {"name": "hf-segformer", "weights": str(weights)},
            SEGMENTS,
            "those of a bert; give those of a segformer",
        ),
        (
            {"name": "hf-distilbert", "weights": str(weights)},
            NEWS,
            "those of a bert; give those of a distilbert",
        ),
        ({"name": "hf-bert", "weights": str(weights), "config": {}}, NEWS, "weights bring their own"),
        ({"name": "hf-bert", "config": {"hiden_size": 8}}, NEWS, "bert has no setting 'hiden_size'"),
        ({"name": "hf-bert", "config": SMALL, "lora": -1}, NEWS, "lora is -1"),
        (
            {"name": "hf-bert", "config": SMALL, "lora": True},
            NEWS,
            "lora is True; give a rank, a whole number",
        ),
        (
            {"name": "hf-bert", "config": SMALL, "lora": "all"},
            NEWS,
            "lora is 'all'; give a rank, a whole number",
        ),
        ({"name": "hf-bert", "config": 3}, NEWS, "config is 3; give settings of the network"),
        ({"name": "hf-bert", "config": {"hidden_size": "wide"}}, NEWS, "config: .*hidden_size"),
        ({"name": "hf-bert", "config": SMALL | {"num_attention_heads": 3}}, NEWS, "config: .*heads"),
        ({"name": "hf-bert", "config": SMALL | {"hidden_size": [3]}}, NEWS, "config: .*hidden_size"),
        ({"name": "hf-bert", "config": SMALL | {"hidden_act": "gleu"}}, NEWS, "config: 'gleu'; correct"),
        ({"name": "hf-bert", "config": SMALL | {"model_type": "vit"}}, NEWS, "config: .*model_type"),
        (
            {"name": "hf-bert", "config": SMALL | {"max_position_embeddings": 8}},
            NEWS,
            "12 tokens, .* 8 at most",
        ),
    ]:
        with pytest.raises(ModelError, match=sentence):
            build(entry, task)
    with pytest.raises(ModelError, match="has no tokenizer"):
        hf.tokenize(str(weights), ["text"], 4)
    (weights / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="could not be loaded"):
        build({"name": "hf-bert", "weights": str(weights)}, NEWS)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "vit", "patch_size": 1025}, "patch_size is 1025"),
        ({"model_type": "vit", "patch_size": 0}, "patch_size is 0"),
        ({"model_type": "segformer", "strides": [64], "sr_ratios": [64]}, "is 4096"),
    ],
)
def test_a_patch_that_would_enlarge_images_without_end_is_refused(settings, named):
    with pytest.raises(ModelError, match=named):
        hf._step(SimpleNamespace(**settings))
