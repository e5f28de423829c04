"""`compare_models` on tiny checkpoints, its numbers recomputed by transformers; and the arithmetic by hand."""

from __future__ import annotations

import copy
import json
import math
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given  # noqa: E402 - what follows needs torch, which is not everywhere here
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from pagedcore.cli import main  # noqa: E402
from pagedcore.commands import trial  # noqa: E402
from pagedcore.commands.agreement import AgreementTally, PositionScores, score_positions  # noqa: E402
from pagedcore.commands.compare import compare_models, read_text  # noqa: E402
from pagedcore.commands.comparison import Comparison  # noqa: E402
from pagedcore.commands.trial import Traffic  # noqa: E402
from pagedcore.config import EngineConfig  # noqa: E402
from pagedcore.errors import ConfigError, EngineError, InvalidRequestError, PromptTooLongError  # noqa: E402
from pagedcore.models.embedded import EMBEDDED_NAME  # noqa: E402
from pagedcore.text.tokenizer import load_tokenizer  # noqa: E402
from support.small_tokenizers import CHATML, make_byte_level, make_metaspace, save_folder  # noqa: E402
from support.tiny_models import Checkpoint, make_checkpoint, reference_logits  # noqa: E402

pytestmark = pytest.mark.needs_torch

VOCAB_SIZE = make_byte_level().get_vocab_size()
TEXT = "hello world, my bad: stop or go on. " * 4 + "The last words are others."


def make_model(folder: Path, **changes: Any) -> Checkpoint:
    """A tiny model with a byte-level tokenizer of its own size, unless `changes` says another."""
    checkpoint = make_checkpoint(folder, "llama", **{"vocab_size": VOCAB_SIZE, **changes})
    save_folder(folder, make_byte_level(), chat_template=CHATML)
    return checkpoint


def make_neighbour(folder: Path, checkpoint: Checkpoint) -> Checkpoint:
    """The same model with a little noise on all weights."""
    model = copy.deepcopy(checkpoint.reference)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(folder)
    save_folder(folder, make_byte_level())
    return Checkpoint(folder, model)


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.from_mapping({"model": str(folder), "device": "cpu", "num_kv_blocks": 64, "block_size": 8, **options})


def compare(a: Path, b: Path, text: str = TEXT, **options: Any) -> Comparison:
    return compare_models(config(a), config(b), text, **options)


@pytest.fixture
def _few_timed_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is not speed."""
    monkeypatch.setattr(trial, "MAX_PROMPTS", 2)


def test_positions_are_scored_as_by_hand() -> None:
    p_a = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]])
    p_b = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]])
    logits_a, logits_b = p_a.log() + 3.0, p_b.log() - 100.0  # a constant added to all logits changes nothing
    scores = score_positions(logits_a, logits_b, torch.tensor([0, 2]))
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(scores.nll_a, torch.tensor([math.log(2), math.log(10)]), **close)
    torch.testing.assert_close(scores.nll_b, torch.tensor([math.log(4), math.log(10)]), **close)
    torch.testing.assert_close(scores.kl, torch.tensor([0.25 * math.log(2), 0.0]), **close)
    assert scores.same_top.tolist() == [False, True]


def test_the_divergence_is_of_a_from_b_and_not_the_other_way() -> None:
    a, b = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    targets = torch.tensor([0])
    assert score_positions(a, b, targets).kl.item() == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), abs=1e-6)
    assert score_positions(b, a, targets).kl.item() == pytest.approx(0.5 * math.log(5 / 9) + 0.5 * math.log(5), abs=1e-6)


def test_scoring_leaves_float32_logits_as_they_are() -> None:
    a, b = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    kept_a, kept_b = a.clone(), b.clone()
    score_positions(a, b, torch.zeros(5, dtype=torch.int64))
    assert torch.equal(a, kept_a)
    assert torch.equal(b, kept_b)


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-3, 1.0, 50.0]), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_divergence_is_never_negative_and_zero_of_itself(seed: int, scale: float, dtype: Any) -> None:
    a, b = (scale * torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(seed))).to(dtype)
    targets = torch.tensor([0, 1, 2])
    scores = score_positions(a, b, targets)
    assert (scores.kl >= 0).all()
    assert scores.kl.dtype == torch.float32
    assert (score_positions(a, a, targets).kl == 0).all()


def test_a_tally_is_over_all_positions_whatever_the_chunks() -> None:
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0)).float() + 1
    tally = AgreementTally()
    for part in order.split([1, 99, 60, 40]):
        tally.add(PositionScores(nll_a=part, nll_b=2 * part, kl=part, same_top=part <= 150))
    found = tally.result()
    assert found.num_scored_tokens == 200
    assert (found.mean_nll_a_nats, found.mean_nll_b_nats, found.mean_kl_nats) == (100.5, 201.0, 100.5)
    assert found.p99_kl_nats == 198.0  # 198 of 200 are not above it
    assert found.top1_fraction == 0.75


def test_logits_that_are_not_finite_are_an_error_and_not_a_number() -> None:
    tally = AgreementTally()
    tally.add(score_positions(torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 0.0], [math.nan, 0.0, 0.0]]), torch.tensor([0, 0])))
    with pytest.raises(EngineError, match="logits of B are not finite at 1 of 2 positions"):
        tally.result()


def test_a_logit_of_minus_infinity_is_an_error_though_it_is_not_that_of_the_text() -> None:
    tally = AgreementTally()
    tally.add(score_positions(torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.0, 0.0]]), torch.tensor([0])))
    with pytest.raises(EngineError, match="logits of A or B are not finite at 1 of 1 positions"):
        tally.result()


@pytest.mark.usefixtures("_few_timed_prompts")
@pytest.mark.parametrize("window", [20, 64])
def test_numbers_are_those_of_transformers(tmp_path: Path, window: int) -> None:
    """The last window of 20 has one token, which is not scored."""
    a = make_model(tmp_path / "a")
    b = make_neighbour(tmp_path / "b", a)
    token_ids = torch.tensor(load_tokenizer(a.folder).encode(TEXT)[:81])
    found = compare(a.folder, b.folder, window=window, max_text_tokens=81)

    windows = [part for part in token_ids.split(window) if len(part) > 1]
    log_a, log_b = (torch.cat([reference_logits(m.reference, w)[:-1] for w in windows]).log_softmax(-1) for m in (a, b))
    targets = torch.cat([part[1:] for part in windows])[:, None]
    kl = (log_a.exp() * (log_a - log_b)).sum(-1)
    assert found.a.perplexity == pytest.approx(log_a.gather(-1, targets).mean().neg().exp().item(), rel=1e-4)
    assert found.b.perplexity == pytest.approx(log_b.gather(-1, targets).mean().neg().exp().item(), rel=1e-4)
    assert found.agreement.mean_kl_nats == pytest.approx(kl.mean().item(), rel=1e-4)
    assert found.agreement.p99_kl_nats == pytest.approx(kl.sort().values[math.ceil(0.99 * len(kl)) - 1].item(), rel=1e-4)
    assert found.agreement.top1_fraction == (log_a.argmax(-1) == log_b.argmax(-1)).double().mean().item()
    assert found.agreement.num_scored_tokens == len(targets)
    assert (found.text.num_text_tokens, found.text.num_windows, found.text.window_tokens) == (81, len(windows), window)
    assert found.agreement.mean_kl_nats > 0.01, "the models must differ"
    assert 0.1 < found.agreement.top1_fraction < 0.99, "and not be strangers"


def test_a_model_agrees_with_itself_and_every_number_is_there(tmp_path: Path) -> None:
    folder = make_model(tmp_path).folder
    found = compare(folder, folder)
    assert found.agreement.mean_kl_nats == 0.0
    assert found.agreement.p99_kl_nats == 0.0
    assert found.agreement.top1_fraction == 1.0
    assert found.a.perplexity == found.b.perplexity
    assert found.a.checkpoint_bytes == (folder / "model.safetensors").stat().st_size
    assert found.a.weight_bytes == sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert (found.a.device, found.a.dtype, found.a.quantization) == ("cpu", "float32", None)
    assert (found.text.window_tokens, found.speed.prompt_tokens, found.speed.output_tokens) == (64, 32, 32)
    assert found.speed.num_prompts == 16
    assert found.speed.num_rounds == 3
    for report in (found.a, found.b):
        assert 0 < report.slowest_output_tokens_per_s <= report.output_tokens_per_s <= report.fastest_output_tokens_per_s
    assert found.traffic is None


@pytest.mark.usefixtures("_few_timed_prompts")
def test_files_of_an_index_count_once_and_others_do_not(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", vocab_size=VOCAB_SIZE, max_shard_size="60KB")
    save_folder(tmp_path, make_byte_level())
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shutil.copy(shards[0], tmp_path / "consolidated.safetensors")
    assert compare(tmp_path, tmp_path).b.checkpoint_bytes == sum(path.stat().st_size for path in shards)


@pytest.mark.usefixtures("_few_timed_prompts")
def test_dummy_weights_have_no_files(tmp_path: Path) -> None:
    folder = make_model(tmp_path).folder
    (folder / "model.safetensors").unlink()
    found = compare_models(config(folder, load_format="dummy"), config(folder, load_format="dummy"), TEXT)
    assert found.a.checkpoint_bytes == 0
    assert found.agreement.top1_fraction == 1.0


def test_traffic_counts_hits_by_level_from_an_empty_cache(tmp_path: Path) -> None:
    """One at a time: the second and third request find every full block before their last token. The timed prompts begin like them."""
    folder = make_model(tmp_path).folder
    prompt = "hello world, stop or my bad. " * 2
    length = len(load_tokenizer(folder).encode(prompt))
    num_blocks = (length - 1) // 8
    assert num_blocks > 0
    found = compare(folder, folder, text=prompt * 3, traffic=Traffic(prompts=[prompt] * 3, concurrency=1, output_tokens=4))
    for report in (found.a.traffic, found.b.traffic):
        assert report is not None
        assert report.page_hit_rate == pytest.approx(2 / 3)
        assert report.prefix_hit_rate == pytest.approx(2 * 8 * num_blocks / (3 * length))
        assert 0 < report.pool_hit_rate < 1
        assert (report.num_blocks, report.pool_tokens) == (64, 512)
        assert report.kv_cache_bytes == 64 * 8 * 2 * 2 * 8 * 4 * 2  # blocks, slots, keys and values, heads, head size, bytes, layers
    assert found.traffic is not None
    assert (found.traffic.num_requests, found.traffic.num_prompt_tokens) == (3, 3 * length)


@pytest.mark.usefixtures("_few_timed_prompts")
def test_conversations_of_the_traffic_go_through_the_chat_template(tmp_path: Path) -> None:
    folder = make_model(tmp_path).folder
    messages = [{"role": "user", "content": "hello"}]
    tokenizer = load_tokenizer(folder)
    found = compare(folder, folder, traffic=Traffic(prompts=[messages], output_tokens=2))
    assert found.traffic is not None
    assert found.traffic.num_prompt_tokens == len(tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False))


def pad_vocabulary(source: Path, target: Path, num_rows: int) -> None:
    """The same model with more rows of vocabulary that no token has, and which it would choose."""
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], 9 * weights[name][:num_rows]])
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**settings, "vocab_size": settings["vocab_size"] + num_rows}))


@pytest.mark.usefixtures("_few_timed_prompts")
def test_rows_of_padding_are_left_out(tmp_path: Path) -> None:
    make_model(tmp_path / "a")
    pad_vocabulary(tmp_path / "a", tmp_path / "b", 5)
    for first, second in (("a", "b"), ("b", "a")):
        found = compare(tmp_path / first, tmp_path / second)
        assert (found.text.vocab_size, found.text.num_left_out_logits) == (VOCAB_SIZE, 5)
        assert found.agreement.mean_kl_nats == pytest.approx(0.0, abs=1e-5)
        assert found.agreement.top1_fraction == 1.0
        assert found.a.perplexity == pytest.approx(found.b.perplexity, rel=1e-5)


def test_vocabularies_that_differ_by_tokens_are_refused(tmp_path: Path) -> None:
    a, b = make_model(tmp_path / "a"), make_model(tmp_path / "b", vocab_size=VOCAB_SIZE - 8)
    with pytest.raises(ConfigError, match=f"A has logits for {VOCAB_SIZE} tokens, B for {VOCAB_SIZE - 8}.*more than padding"):
        compare(a.folder, b.folder)


def test_ids_that_the_models_do_not_have_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path, vocab_size=100).folder
    with pytest.raises(ConfigError, match="logits for ids below 100 only"):
        compare(folder, folder)


def test_other_tokenizers_are_refused_with_the_first_token_that_differs(tmp_path: Path) -> None:
    a, b = make_model(tmp_path / "a"), make_model(tmp_path / "b")
    save_folder(b.folder, make_metaspace())
    with pytest.raises(ConfigError, match=r"tokenizers of .* differ on this text, first at token 0 .*cannot be compared"):
        compare(a.folder, b.folder)


@pytest.mark.parametrize(("text", "count"), [("", 1), ("h", 2)])
def test_a_text_needs_two_tokens(tmp_path: Path, text: str, count: int) -> None:
    """The tokenizer adds one of its own."""
    folder = make_model(tmp_path).folder
    if count < 2:
        with pytest.raises(InvalidRequestError, match=f"The text has {count} tokens and at least 2 are needed"):
            compare(folder, folder, text=text)
    else:
        assert compare(folder, folder, text=text).agreement.num_scored_tokens == 1


@pytest.mark.parametrize("window", [1, 65])
def test_a_window_must_fit_both_models(tmp_path: Path, window: int) -> None:
    a, b = make_model(tmp_path / "a", max_position_embeddings=128), make_model(tmp_path / "b")
    with pytest.raises(ConfigError, match=f"window is {window} and must be between 2 and 64"):
        compare(a.folder, b.folder, window=window)


def test_a_model_that_holds_one_token_cannot_be_scored(tmp_path: Path) -> None:
    folder = make_model(tmp_path).folder
    with pytest.raises(ConfigError, match="max_model_len is 1 and must be at least 2 to compare models"):
        compare_models(config(folder, max_model_len=1), config(folder), TEXT)


def test_settings_that_cannot_work_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = make_model(tmp_path).folder
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ConfigError, match=r"max_model_len is 65 and .* at most 64 tokens"):
        compare_models(config(folder, max_model_len=65), config(folder), TEXT)
    with pytest.raises(ConfigError, match="leave out skip_tokenizer_init"):
        compare_models(config(folder, skip_tokenizer_init=True), config(folder), TEXT)
    with pytest.raises(ConfigError, match="max_text_tokens is -5 and must be at least 2"):
        compare(folder, folder, max_text_tokens=-5)
    with pytest.raises(PromptTooLongError, match="Request 1 of the traffic"):
        compare(folder, folder, traffic=Traffic(prompts=["hello " * 100]))


@pytest.mark.usefixtures("_few_timed_prompts")
def test_progress_names_its_steps_and_each_one_ends(tmp_path: Path) -> None:
    folder = make_model(tmp_path).folder
    calls: list[tuple[str, int, int]] = []
    traffic = Traffic(prompts=["hello"] * 3, concurrency=1, output_tokens=1)
    compare(folder, folder, traffic=traffic, progress=lambda *call: calls.append(call))
    engines = [f"{what} {label}" for label in "AB" for what in ("Warming up", "Traffic", "Timing")]
    names = ["Loading A", "Loading B", "Scoring", *engines]
    assert list(dict.fromkeys(what for what, _, _ in calls)) == names
    for name in names:
        done = [(count, total) for what, count, total in calls if what == name]
        assert max(done) == (done[-1][1], done[-1][1])


def test_both_engines_are_warmed_up_with_all_that_is_timed(tmp_path: Path) -> None:
    """What a process pays once would count against A, and B would look faster than a copy of itself."""
    folder = make_model(tmp_path).folder
    calls: list[tuple[str, int, int]] = []
    found = compare(folder, folder, progress=lambda *call: calls.append(call))
    num_prompts, num_timed = found.speed.num_prompts, found.speed.num_prompts * found.speed.num_rounds
    for label in "AB":
        assert (f"Warming up {label}", num_prompts, num_prompts) in calls
        assert (f"Timing {label}", num_timed, num_timed) in calls


@pytest.fixture
def _ctrl_c_raises() -> Iterator[None]:
    """Python's own handler, whatever a test before has left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_raises")
def test_ctrl_c_while_an_engine_runs_leaves_no_thread_behind(tmp_path: Path) -> None:
    folder = make_model(tmp_path).folder
    main_thread, before = threading.main_thread(), set(threading.enumerate())

    def interrupt(what: str, done: int, total: int) -> None:
        if (what, done) == ("Timing A", 1):
            signal.pthread_kill(main_thread.ident, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        compare(folder, folder, progress=interrupt)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("pagedcore")]


def test_a_text_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The text file .*none' cannot be read: .*; check --text\."):
        read_text(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="it is not UTF-8"):
        read_text(tmp_path / "latin")


def test_the_command_compares_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model(tmp_path / "m").folder
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "traffic.txt").write_text("hello world\nmy bad\n")
    arguments = ["compare", str(folder), str(folder), "--text", str(tmp_path / "text.txt"), "--num-kv-blocks", "64", "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--traffic", str(tmp_path / "traffic.txt"), "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["agreement"]["top1_fraction"] == 1.0
    assert found["traffic"]["num_requests"] == 2
    assert found["a"]["traffic"]["pool_tokens"] == 64 * 16


@pytest.mark.model
@pytest.mark.slow
def test_the_embedded_model_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "OUTPUT_TOKENS", 4)  # of each prompt of the speed trial, which other tests are for
    text = (
        "The sun is a star. It is so large that more than a million planets of the size of the Earth would fit into it. Its light needs "
        "about eight minutes to reach us. Plants turn this light into sugar, and animals eat the plants, so that almost all life on Earth "
        "depends on the sun."
    )
    options = {"device": "cpu", "num_kv_blocks": 100, "max_model_len": 256}
    found = compare_models(EngineConfig(**options), EngineConfig(model=EMBEDDED_NAME, **options), text, max_text_tokens=48, window=30)
    assert found.agreement.mean_kl_nats == 0.0
    assert found.agreement.top1_fraction == 1.0
    assert (found.agreement.num_scored_tokens, found.text.num_windows) == (46, 2)
    assert 2.0 < found.a.perplexity < 100.0
    assert found.a.model == found.b.model == EMBEDDED_NAME
