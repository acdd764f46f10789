"""Means against explicit loops over one prompt at a time; the cache on disk."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import FAMILIES, HEADS, attention_of, random_ids, tiny_model

from lm_eval_locos import cache
from lm_eval_locos.architecture import Head, describe
from lm_eval_locos.calibration import calibrate, constants, read_prompts
from lm_eval_locos.errors import DataError

PROMPTS = random_ids(20, 3, 11, 11, 1, 8)


def slow_activations(model, prompt, site, family="llama"):
    """(tokens, layers, heads, size) of one prompt, without padding."""
    case, kept = FAMILIES[family], []

    def keep(module, args, output):
        kept.append((output if site == "query" else args[0])[0])

    handles = []
    for layer in case.layers:
        attention = attention_of(model, family, layer)
        module = getattr(attention, case.query if site == "query" else case.output)
        handles.append(module.register_forward_hook(keep))
    with torch.inference_mode():
        model(torch.tensor([prompt]))
    for handle in handles:
        handle.remove()
    size = case.size if site == "query" else kept[0].shape[-1] // HEADS
    rows = [list(case.rows(head, size)) for head in range(HEADS)]
    if site == "output":
        rows = [list(range(head * size, (head + 1) * size)) for head in range(HEADS)]
    values = torch.zeros(len(prompt), 3, HEADS, size, dtype=torch.float64)
    values[:, list(case.layers)] = torch.stack([x[:, rows] for x in kept], 1).double()
    return values


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("site", ["query", "output"])
@pytest.mark.parametrize("average", ["prompt", "token"])
def test_means_equal_explicit_loops_at_any_batch_size(family, site, average):
    model = tiny_model(family)
    activations = [slow_activations(model, prompt, site, family) for prompt in PROMPTS]
    if average == "prompt":
        expected = torch.stack([a.mean(0) for a in activations]).mean(0)
    else:
        expected = torch.cat(activations).mean(0)
    for batch_size in (1, 2, 4, 6):
        found = calibrate(
            model, PROMPTS, site=site, average=average, batch_size=batch_size, progress=False
        )
        torch.testing.assert_close(found.means.double(), expected, rtol=1e-5, atol=1e-5)
        assert found.num_prompts == 6
        assert found.num_tokens == sum(map(len, PROMPTS))


def test_samples_are_values_of_their_own_prompt():
    model = tiny_model("llama")
    found = calibrate(model, PROMPTS, site="query", batch_size=4, progress=False)
    for sample, prompt in zip(found.samples, PROMPTS, strict=True):
        values = slow_activations(model, prompt, "query").float()
        distance = (values - sample).abs().amax((1, 2, 3))
        assert distance.min() < 1e-5


def test_calibration_leaves_no_hooks():
    model = tiny_model("llama")
    calibrate(model, PROMPTS, site="output", progress=False)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(("prompts", "words"), [([], "0 prompts"), ([[3], []], "is empty")])
def test_nothing_to_measure_is_an_error(prompts, words):
    with pytest.raises(DataError, match=words):
        calibrate(tiny_model("llama"), prompts, site="query")


def test_constants_of_each_mode():
    model = tiny_model("llama")
    found = calibrate(model, PROMPTS, site="query", progress=False)
    heads = [Head(1, 2), Head(0, 3)]
    zero = constants(found, heads, mode="zero", seed=1)
    mean = constants(found, heads, mode="mean", seed=1)
    drawn = constants(found, heads, mode="resample", seed=1)
    for head in heads:
        assert not zero[head].any()
        assert torch.equal(mean[head], found.means[head.layer, head.head])
        assert any(torch.equal(drawn[head], s[head.layer, head.head]) for s in found.samples)
    again = constants(found, heads, mode="resample", seed=1)
    assert all(torch.equal(drawn[h], again[h]) for h in heads)
    seeds = [constants(found, heads, mode="resample", seed=s)[heads[0]] for s in range(20)]
    assert any(not torch.equal(drawn[heads[0]], other) for other in seeds)


# -- files of prompts


def test_prompts_from_text_and_jsonl(tmp_path):
    text, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one prompt\n\nanother, é\n", encoding="utf-8")
    rows.write_text('{"text": "one prompt"}\n{"text": "another\\nline", "id": 3}\n')
    assert read_prompts(text) == ["one prompt", "another, é"]
    assert read_prompts(rows) == ["one prompt", "another\nline"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no prompts"),
        ("{", "line 1: not JSON"),
        ('{"text": "a"}\n{"prompt": "b"}', "line 2: no text in it"),
        ('{"text": 3}', "line 1: no text in it"),
        ("[1]", "line 1: no text in it"),
    ],
)
def test_bad_prompt_files_are_explained(tmp_path, content, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        read_prompts(path)


def test_missing_prompt_file_is_explained(tmp_path):
    with pytest.raises(DataError, match=r"nothing.txt: cannot be read .* name of a task family"):
        read_prompts(tmp_path / "nothing.txt")


# -- the cache


@pytest.fixture
def counted(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCOS_CACHE_DIR", str(tmp_path))
    model = tiny_model("llama")
    calls = []

    def measure():
        calls.append(1)
        return calibrate(model, PROMPTS, site="query", progress=False)

    return measure, calls, tmp_path


def test_cache_measures_once_and_returns_the_same_numbers(counted):
    measure, calls, _ = counted
    first, second = cache.cached({"a": 1}, measure), cache.cached({"a": 1}, measure)
    assert len(calls) == 1
    assert first.sha256 == second.sha256
    assert first.num_tokens == second.num_tokens
    cache.cached({"a": 2}, measure)
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "other"])
def test_damaged_cache_is_noticed_and_rebuilt(counted, damage, caplog):
    measure, calls, folder = counted
    first = cache.cached({"a": 1}, measure)
    (path,) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        data = data[:-10]
    elif damage == "flip":
        data[-5] ^= 0xFF
    elif damage == "empty":
        data = bytearray()
    else:
        cache.cached({"a": 2}, measure)
        (other,) = set(folder.glob("*.safetensors")) - {path}
        data = bytearray(other.read_bytes())
        calls.pop()
    path.write_bytes(data)
    assert cache.cached({"a": 1}, measure).sha256 == first.sha256
    assert len(calls) == 2
    assert "damaged" in caplog.text
    cache.cached({"a": 1}, measure)
    assert len(calls) == 2


def test_unwritable_cache_is_a_warning(counted, caplog, monkeypatch):
    measure, calls, folder = counted
    (folder / "file").write_text("")
    monkeypatch.setenv("LOCOS_CACHE_DIR", str(folder / "file"))
    assert cache.cached({"a": 1}, measure).num_prompts == 6
    assert "cannot be kept" in caplog.text
    assert calls == [1]


def settings_changed(**changes):
    model = tiny_model("mistral")
    config = copy.deepcopy(model.config)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    other = type(model)._from_config(config).eval()
    other.load_state_dict(model.state_dict())
    return model, other


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 13},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"rms_norm_eps": 1e-3},
    ],
)
def test_model_identity_sees_settings_without_weights(changes):
    """The means of the one are not those of the other."""
    model, other = settings_changed(**changes)
    assert cache.model_identity(model) != cache.model_identity(other)
    means = [calibrate(m, PROMPTS, site="output", progress=False).means for m in (model, other)]
    assert (means[0] - means[1]).abs().max() > 1e-6


def test_model_identity_does_not_see_where_it_came_from_or_how_it_runs(tmp_path):
    model = tiny_model("llama")
    identity = cache.model_identity(model)
    model.save_pretrained(tmp_path)
    for attn in ("sdpa", "eager"):
        again = type(model).from_pretrained(tmp_path, attn_implementation=attn)
        assert cache.model_identity(again.eval()) == identity


def test_model_identity_sees_the_adapters_alpha():
    from peft import LoraConfig, get_peft_model

    found = set()
    for alpha in (4, 64):
        torch.manual_seed(0)
        config = LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj", "o_proj"])
        found.add(cache.model_identity(get_peft_model(tiny_model("llama"), config)))
    assert len(found) == 2


def test_model_identity_sees_any_changed_tensor_and_nothing_else():
    model = tiny_model("llama")
    identity = cache.model_identity(model)
    assert identity == cache.model_identity(tiny_model("llama"))
    assert identity != cache.model_identity(tiny_model("llama", seed=1))
    with torch.no_grad():
        model.get_decoder().layers[2].self_attn.q_proj.weight.mul_(1.01)
    assert identity != cache.model_identity(model)
    assert cache.model_identity(model) != cache.model_identity(model.bfloat16())
    assert describe(model).num_layers == 3


def test_line_separators_in_text_and_a_mark_at_its_start_are_no_line_ends(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('\ufeff{"text": "one\u2028and on"}\n\n{"text": "two"}\r\n', encoding="utf-8")
    assert read_prompts(path) == ["one\u2028and on", "two"]


@pytest.mark.parametrize("name", ["~nobody-is-called-so/prompts.txt", "a\0b", "x" * 5000])
def test_impossible_names_are_refused(name):
    with pytest.raises(DataError, match=r"cannot be read.*Give a text file"):
        read_prompts(name)


@pytest.mark.parametrize("line", ["[" * 100_000, "1" * 5000, "{", "\u0663"])
def test_hostile_lines_are_refused(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(DataError, match="line 1: "):
        read_prompts(path)
