# SPDX-License-Identifier: Apache-2.0
"""The OPD script itself on forked ranks: the whole sharded step against float64, the probe, resume, alarms, bad input."""
from __future__ import annotations

import json
import logging
import math
import sys

import pytest
import torch
from ranks import run_ranks
from tiny import VOCAB, write_config, write_lm, write_prompts, whole

import train_opd
from distill_core import config as cfg
from distill_core import teacher as teacher_module
from distill_core.build import load_lm
from distill_core.generate import Engine
from distill_core.metrics import Metrics, read_jsonl
from distill_core.run import StopRequest, open_run
from distill_core.teacher import RemoteTeacher
from distill_core.topology import make_groups

CPU = torch.device("cpu")


def live(path, num_ranks: int, on_student, overrides=(), timeout_s: int = 20):
    """Every rank prepares the job; teacher ranks serve for life, students run `on_student(job, world)`."""
    def body(rank):
        job = train_opd.prepare(cfg.load(path, overrides), num_ranks, num_ranks)
        world = make_groups(job.plan, CPU, job.config.topology.timeout_s)
        if not world.is_student:
            return train_opd.serve_teacher(job, world)
        return on_student(job, world)

    return run_ranks(body, num_ranks, timeout_s=timeout_s)


def whole_run(path, num_ranks: int, overrides=()):
    """What train_opd.py does on each rank after the command line, without ending the process on errors."""
    def on_student(job, world):
        log = open_run(job.run_dir, cfg.to_yaml(job.config), world.rank)
        log.handlers = [h for h in log.handlers if isinstance(h, logging.FileHandler)]
        train_opd.train(job, world, log, StopRequest(job.run_dir))

    return live(path, num_ranks, on_student, overrides)


# --- the whole sharded step -----------------------------------------------------------------------------------------

def reference(path, overrides, samples) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """Loss, diagnostics and gradients of one step in float64 by autograd on dense logits, one sample at a time."""
    config = cfg.load(path, overrides)
    student = load_lm(config.student.path, torch.float64)
    teachers = [load_lm(teacher.path, torch.float64) for teacher in cfg.teachers_of(config)]
    job = train_opd.prepare(config, 8, 8)
    routes = {tuple(prompt.ids): job.route(prompt) for prompt in job.train}
    vocab = min(model.config.vocab_size for model in (student, *teachers))
    temperature, k = config.rollout.temperature, config.loss.top_k
    names = ("student_mass", "teacher_mass", "overlap_ratio", "teacher_entropy", "student_entropy", "sampled_kl")
    total, count, sums = 0.0, 0, dict.fromkeys(names, 0.0)
    for sample in samples:
        teacher = teachers[routes[tuple(sample.prompt)]]
        tokens, first = torch.tensor([sample.prompt + sample.tokens]), len(sample.prompt)
        place = slice(first - 1, tokens.shape[1] - 1)
        s = student.lm_head(student(tokens))[0, place, :vocab] / temperature
        with torch.no_grad():
            t = teacher.lm_head(teacher(tokens))[0, place, :vocab] / temperature
        logq, logp = s.log_softmax(-1), t.log_softmax(-1)  # q: student, p: teacher
        ids, teacher_ids = sample.topk_ids.long(), logp.topk(k).indices
        assert torch.equal(logq.topk(k).indices, ids), "the captured ids are the student's top-K"
        top_q, top_p = logq.gather(1, ids).log_softmax(-1), logp.gather(1, ids).log_softmax(-1)
        own_q, own_p = logq.gather(1, teacher_ids).log_softmax(-1), logp.gather(1, teacher_ids).log_softmax(-1)
        sampled = torch.tensor(sample.tokens)[:, None]
        on_q, on_p = logq.gather(1, ids), logp.gather(1, ids)
        tail_q, tail_p = (torch.log1p(-on.exp().sum(-1)) for on in (on_q, on_p))
        mixed = (0.7 * top_p.exp() + 0.3 * top_q.exp()).log()
        losses = {
            "generalized_kl_topk": (on_q.exp() * (on_q - on_p) - on_q.exp() + on_p.exp()).sum(-1),
            "tail_bucket_kl_topk": (on_q.exp() * (on_q - on_p)).sum(-1) + tail_q.exp() * (tail_q - tail_p),
            "reverse_kl_topk_unnormalized": (on_q.exp() * (on_q - on_p)).sum(-1),
            "jsd_topk": (0.7 * top_p.exp() * (top_p - mixed) + 0.3 * top_q.exp() * (top_q - mixed)).sum(-1) / (0.7 * 0.3),
            "reverse_kl_topk": (top_q.exp() * (top_q - top_p)).sum(-1),
            "forward_kl_topk": (own_p.exp() * (own_p - own_q)).sum(-1),
            "reverse_kl_full": (logq.exp() * (logq - logp)).sum(-1), "forward_kl_full": (logp.exp() * (logp - logq)).sum(-1),
            "reverse_kl_sampled": -(logp - logq).gather(1, sampled)[:, 0].detach() * logq.gather(1, sampled)[:, 0]}
        entropy = -(logq.exp() * logq).sum(-1)
        chosen = entropy.argsort(descending=True)[:math.ceil(config.loss.token_fraction * len(sample.tokens) - 1e-9)]
        total, count = total + losses[config.loss.mode][chosen].sum(), count + len(chosen)
        if config.loss.token_fraction < 1:
            continue
        overlap = (ids[:, :, None] == teacher_ids[:, None, :]).any(-1)
        sums["student_mass"] += logq.gather(1, ids).exp().sum().item()
        sums["teacher_mass"] += logp.gather(1, ids).exp().sum().item()
        sums["overlap_ratio"] += overlap.double().mean(-1).sum().item()
        sums["teacher_entropy"] -= (logp.exp() * logp).sum().item()
        sums["student_entropy"] -= (logq.exp() * logq).sum().item()
        sums["sampled_kl"] += (logq - logp).gather(1, sampled).sum().item()
    (total / count).backward()
    return (total / count).item(), {name: value / count for name, value in sums.items()}, {
        name: p.grad for name, p in student.named_parameters()}


def one_step(job, world):
    """The step's loss, metrics, this rank's samples, and gradients as the change of parameters under SGD with lr 1."""
    run = train_opd.build_student(job, world, logging.getLogger("test"))
    run.teachers = train_opd.connect_teachers(job, world, probing=False)
    before = {name: whole(p).clone() for name, p in run.student.module.named_parameters()}
    run.student.optimizer = torch.optim.SGD(run.student.module.parameters(), lr=1.0)
    run.student.lr = lambda step: 1.0
    rollout, metrics = train_opd.roll(run), Metrics()
    samples = rollout.samples[0]
    result, _ = train_opd.train_step(run, rollout.batches[0], metrics)
    values = metrics.reduce(world.students_control)
    change = {name: before[name] - whole(p) for name, p in run.student.module.named_parameters()}
    run.teachers.stop()
    return result, values, samples, change


LAYOUTS = [(1, 0, 4000), (3, 1, 40), (4, 2, 30), (4, 0, 25)]  # ranks, teacher ranks, token budget
MODES = ["reverse_kl_topk", "forward_kl_topk", "reverse_kl_full", "forward_kl_full", "reverse_kl_sampled"]
MORE_MODES = ["generalized_kl_topk", "tail_bucket_kl_topk", "jsd_topk", "reverse_kl_topk_unnormalized"]


@pytest.mark.parametrize("mode, layout", [*((mode, layout) for mode in MODES for layout in LAYOUTS),
                                          *((mode, LAYOUTS[2]) for mode in MORE_MODES)])
def test_loss_diagnostics_and_gradients_equal_float64(tmp_path, mode, layout):
    """Catches a shift by one, prompt or padding positions in the loss, means of means, a wrong temperature, wrong gradients
    under sharding, rows lost between ranks: everything that a training curve would not show."""
    ranks, teacher_ranks, budget = layout
    path = write_config(tmp_path, loss__mode=mode, loss__jsd_beta=0.7, topology__teacher_ranks=teacher_ranks,
                        rollout__temperature=0.8, train__micro_batch_tokens=budget, optim__max_grad_norm=1e9, probe__enabled=False,
                        rollout__stop_ids=list(range(0, 257, 4)), train__prompts_per_step=4,
                        rollout__samples_per_prompt=2)
    write_lm(tmp_path / "wide_teacher", seed=2, vocab_size=VOCAB + 9, tie_word_embeddings=False)
    overrides = [f"teacher.path={tmp_path / 'wide_teacher'}", "student.activation_checkpointing=true"]
    results = [r for r in live(path, ranks, one_step, overrides) if r is not None]
    samples = [sample for result in results for sample in result[2]]
    assert len(samples) == 8 and len({len(s.tokens) for s in samples}) > 1, "different lengths, all samples"
    assert len({tuple(s.prompt) for s in samples}) == 4 and len({tuple(s.tokens) for s in samples}) == 8
    loss, diagnostics, gradients = reference(path, overrides, samples)
    for result, values, _, change in results:
        assert result.applied and result.count == sum(len(s.tokens) for s in samples)
        assert result.loss == pytest.approx(loss, abs=1e-5)
        for name, value in diagnostics.items():
            assert values[name] == pytest.approx(value, abs=1e-5), name
        for name, gradient in gradients.items():
            torch.testing.assert_close(change[name].double(), gradient, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")
        if mode == "reverse_kl_topk":  # with captured ids the loss equals that of a second student pass
            assert values["logprob_gap"] < 1e-5


def check_step(path, ranks: int, overrides=()):
    """One step on `ranks` ranks against the float64 reference; the metrics of the ranks."""
    results = [r for r in live(path, ranks, one_step, overrides) if r is not None]
    loss, _, gradients = reference(path, overrides, [sample for result in results for sample in result[2]])
    for result, _, _, change in results:
        assert result.loss == pytest.approx(loss, abs=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(change[name].double(), gradient, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")
    return [values for _, values, _, _ in results]


STEP = {"optim__max_grad_norm": 1e9, "probe__enabled": False, "rollout__stop_ids": list(range(0, 257, 4)),
        "train__prompts_per_step": 4, "rollout__samples_per_prompt": 2}


@pytest.mark.parametrize("ranks, teacher_ranks", [(3, 1), (2, 0)])
def test_a_step_that_never_sees_the_vocabulary_is_the_same_step(tmp_path, ranks, teacher_ranks):
    """Catches a sparse path (no masses wanted) with other values than the one that goes through the vocabulary."""
    path = write_config(tmp_path, topology__teacher_ranks=teacher_ranks, metrics__mass_every=0, **STEP)
    for values in check_step(path, ranks):
        assert {"student_mass", "student_entropy", "logprob_gap"} < set(values) and "teacher_mass" not in values


@pytest.mark.parametrize("ranks, teacher_ranks", [(4, 2), (2, 0)])
@pytest.mark.parametrize("mode", ["reverse_kl_topk", "reverse_kl_full"])
def test_selected_tokens_equal_masking_the_others(tmp_path, ranks, teacher_ranks, mode):
    """Catches positions chosen over the batch, a mean over all tokens, teacher values of other positions."""
    path = write_config(tmp_path, topology__teacher_ranks=teacher_ranks, loss__token_fraction=0.4, loss__mode=mode, **STEP)
    check_step(path, ranks)


@pytest.mark.parametrize("teacher_ranks", [(1, 2), (0, 1), (0, 0)])
@pytest.mark.parametrize("mode", ["reverse_kl_topk", "reverse_kl_full"])
def test_several_teachers_each_score_their_own_samples(tmp_path, teacher_ranks, mode):
    """Catches samples scored by the wrong teacher, mixed batches put together wrongly, and one teacher's metrics under
    another's name."""
    path = several(tmp_path, teacher_ranks, loss__mode=mode, metrics__mass_every=1, **STEP)
    for values in check_step(path, 2 + sum(teacher_ranks)):
        for name in ("teacher_mass", "overlap_ratio", "teacher_entropy"):
            assert values[f"{name}/one"] != values[f"{name}/two"]
            low, high = sorted([values[f"{name}/one"], values[f"{name}/two"]])
            assert low < values[name] < high, "the overall mean lies between the teachers'"


def several(tmp_path, teacher_ranks, **changes):
    """A config of two teachers of different hidden sizes; prompts alternate between them."""
    path = write_config(tmp_path, **changes)
    write_lm(tmp_path / "wide", seed=7, hidden_size=48, vocab_size=VOCAB + 9, tie_word_embeddings=False)
    for file in ("train.jsonl", "eval.jsonl"):
        rows = [json.loads(line) | {"teacher": ("one", "two")[i % 2]}
                for i, line in enumerate((tmp_path / file).read_text().splitlines())]
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = json.loads(path.read_text())
    del tree["teacher"]
    tree["teachers"] = [{"name": name, "path": str(tmp_path / folder), "ranks": ranks, "chunk_size": 7}
                        for name, folder, ranks in zip(("one", "two"), ("teacher", "wide"), teacher_ranks)]
    path.write_text(json.dumps(tree))
    return path


def test_a_run_with_several_teachers(tmp_path):
    """Catches a probe, an evaluation, a checkpoint or a resume that knows one teacher only, and a prompt without a route."""
    path = several(tmp_path, (1, 0))
    whole_run(path, 3, ["name=straight"])
    whole_run(path, 3, ["name=split", "max_steps=3"])
    whole_run(path, 3, ["name=split"])
    straight, split = (curve(tmp_path / f"runs/{name}/metrics.jsonl") for name in ("straight", "split"))
    assert straight == split and (tmp_path / "runs/split/DONE").exists()
    evals = [line for line in read_jsonl(tmp_path / "runs/split/metrics.jsonl") if line["kind"] == "eval"]
    assert {"eval/reverse_kl_full/one", "eval/reverse_kl_full/two"} < set(evals[0])
    write_prompts(tmp_path / "train.jsonl", 40)
    with pytest.raises(ValueError, match="train.jsonl:1: has no `teacher` key"):
        train_opd.prepare(cfg.load(path), 3, 3)


# --- sampling ahead, several updates, shared counter ----------------------------------------------------------------

@pytest.mark.parametrize("teacher_ranks", [1, 0])
def test_scoring_while_sampling_equals_scoring_afterwards(tmp_path, monkeypatch, teacher_ranks):
    """Catches results that depend on when a request arrives: bit for bit the same curve and weights."""
    path = write_config(tmp_path, topology__teacher_ranks=teacher_ranks, max_steps=4, train__prompts_per_step=16)
    whole_run(path, 2 + teacher_ranks, ["name=overlapped"])
    original = Engine.stream
    monkeypatch.setattr(Engine, "stream", lambda *args, **settings: list(original(*args, **settings)))
    whole_run(path, 2 + teacher_ranks, ["name=sequential"])
    assert curve(tmp_path / "runs/overlapped/metrics.jsonl") == curve(tmp_path / "runs/sequential/metrics.jsonl")
    a, b = (weights_of(tmp_path / f"runs/{name}/checkpoints/step_00000004") for name in ("overlapped", "sequential"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_requests_go_out_while_others_still_decode(tmp_path):
    """Catches an overlap in name only: the first answer must be there before the last sample is."""
    path = write_config(tmp_path, topology__teacher_ranks=1, train__prompts_per_step=24, rollout__max_new_tokens=40)

    def on_student(job, world):
        run = train_opd.build_student(job, world, logging.getLogger("test"))
        run.teachers, seen, original = train_opd.connect_teachers(job, world, probing=False), [], Engine.stream

        def spy(*args, **settings):
            for item in original(*args, **settings):
                seen.append(sum(not handle.reply is None for handle in handles))
                yield item

        handles, request = [], RemoteTeacher.request
        monkey = pytest.MonkeyPatch()
        monkey.setattr(Engine, "stream", spy)
        monkey.setattr(RemoteTeacher, "request", lambda self, r: handles.append(request(self, r)) or handles[-1])
        rollout = train_opd.roll(run)
        train_opd.train_step(run, rollout.batches[0], Metrics())
        run.teachers.stop()
        return seen[-1], len(handles)

    [(early, total)] = [found for found in live(path, 2, on_student, ["probe.enabled=false"]) if found]
    assert 0 < early <= total


@pytest.mark.parametrize("options", [["rollout.updates_per_rollout=2"], ["rollout.async_depth=1"],
                                     ["rollout.async_depth=1", "rollout.updates_per_rollout=2", "loss.importance_clip=2"]])
def test_older_samples_run_resume_and_say_so(tmp_path, options):
    """Catches a stale rollout that is lost or trained twice at a checkpoint, and staleness that is not measured."""
    half = 4 if len(options) > 1 else 2
    path = write_config(tmp_path, topology__teacher_ranks=1, max_steps=2 * half, checkpoint__every=half, eval__every=half)
    whole_run(path, 3, ["name=straight", *options])
    whole_run(path, 3, ["name=split", f"max_steps={half}", *options])
    whole_run(path, 3, ["name=split", *options])
    straight, split = (curve(tmp_path / f"runs/{name}/metrics.jsonl") for name in ("straight", "split"))
    assert straight == split and [row[0] for row in straight if row[1] == "train"] == list(range(1, 2 * half + 1))
    stale = [line["staleness"] for line in read_jsonl(tmp_path / "runs/split/metrics.jsonl") if line["kind"] == "train"]
    assert stale == ([0, 1, 2, 3] * 2 if len(options) > 1 else [0, 1] * 2)
    gaps = [line["logprob_gap"] for line in read_jsonl(tmp_path / "runs/split/metrics.jsonl") if line["kind"] == "train"]
    assert all((gap > 1e-4) == (age > 0) for gap, age in zip(gaps, stale)), "weights that are newer give other log-probs"


def test_a_stop_with_samples_ahead_trains_on_them_first(tmp_path):
    """Catches prompts that are drawn and then lost, or a stop that waits for ever."""
    path = write_config(tmp_path, topology__teacher_ranks=1, rollout__async_depth=1, checkpoint__every=0)

    def on_student(job, world):
        log = open_run(job.run_dir, cfg.to_yaml(job.config), world.rank)
        log.handlers = []
        (job.run_dir / "STOP").touch()
        train_opd.train(job, world, log, StopRequest(job.run_dir))

    live(path, 2, on_student)
    assert (tmp_path / "runs/tiny/checkpoints/step_00000002").is_dir() and (tmp_path / "runs/tiny/PREEMPTED").exists()
    whole_run(path, 2)
    assert [row[0] for row in curve(tmp_path / "runs/tiny/metrics.jsonl") if row[1] == "train"] == list(range(1, 7))


def test_importance_weights_are_those_of_the_sampled_tokens(tmp_path):
    """Catches weights of other tokens or with a gradient: on-policy they are 1, and change nothing."""
    for name, options in (("plain", []), ("weighted", ["loss.importance_clip=3"])):
        whole_run(write_config(tmp_path, topology__teacher_ranks=0, max_steps=2), 1, [f"name={name}", *options])
    plain, weighted = (curve(tmp_path / f"runs/{name}/metrics.jsonl", ("loss", "grad_norm")) for name in ("plain", "weighted"))
    for a, b in zip(plain, weighted, strict=True):
        assert a[:2] == b[:2] and (a[2] is None or b[2:] == pytest.approx(a[2:], rel=1e-4))


def test_importance_weights_change_older_samples_only(tmp_path):
    """Catches weights that are computed and not used: the second step trains on samples of older weights."""
    options = ["rollout.updates_per_rollout=2", "max_steps=2", "topology.teacher_ranks=0", "optim.lr=0.01"]
    for name, clip in (("plain", "null"), ("loose", "9"), ("tight", "1")):
        whole_run(write_config(tmp_path), 1, [f"name={name}", f"loss.importance_clip={clip}", *options])
    losses = {name: [line["loss"] for line in read_jsonl(tmp_path / f"runs/{name}/metrics.jsonl") if line["kind"] == "train"]
              for name in ("plain", "loose", "tight")}
    for name in ("loose", "tight"):
        assert losses[name][0] == pytest.approx(losses["plain"][0], rel=1e-4)
    assert losses["tight"][1] < 0.999 * losses["plain"][1], "weights of at most 1 can only lower a loss that is not negative"
    assert losses["tight"][1] < 0.999 * losses["loose"][1]


@pytest.mark.parametrize("teacher_ranks", [1, 0])
def test_k_may_be_the_whole_vocabulary(tmp_path, teacher_ranks):
    """Catches a service that counts the sampled token to the K of the config."""
    check_step(write_config(tmp_path, topology__teacher_ranks=teacher_ranks, loss__top_k=VOCAB, **STEP), 1 + teacher_ranks)


def test_a_shared_counter_leaves_work_for_ranks_that_are_done_early(tmp_path):
    """Catches a rank that claims prompts before it has sampled the first: the balance would be static, and random."""
    path = write_config(tmp_path, topology__teacher_ranks=0, train__prompts_per_step=16, rollout__batch_size=64,
                        rollout__balance="shared_counter", probe__enabled=False)

    def on_student(job, world):
        run = train_opd.build_student(job, world, logging.getLogger("test"))
        run.teachers, claimed, original = train_opd.connect_teachers(job, world, probing=False), [], train_opd.claim
        train_opd.claim = lambda *args: (claimed.append(index) or index for index in original(*args))
        stream = train_opd.start_sampling(run, [job.train[i] for i in range(16)], run.pulse())
        next(stream)
        early = len(claimed)
        list(stream)
        return early, len(claimed)

    found = live(path, 2, on_student)
    assert all(early <= 8 for early, _ in found) and sum(total for _, total in found) == 16


def test_a_shared_counter_samples_every_prompt_once(tmp_path):
    """Catches prompts lost between ranks, and samples that depend on the rank that draws them."""
    path = write_config(tmp_path, topology__teacher_ranks=0, rollout__balance="shared_counter", **STEP)
    values = check_step(path, 3)
    static = check_step(write_config(tmp_path, topology__teacher_ranks=0, **STEP), 3)
    for name in ("tokens", "student_mass", "student_entropy"):
        assert values[0][name] == pytest.approx(static[0][name], rel=1e-6)


# --- probe ----------------------------------------------------------------------------------------------------------

def run_probe(path, ranks: int, plant=None):
    def on_student(job, world):
        run = train_opd.build_student(job, world, logging.getLogger("test"))
        run.teachers = train_opd.connect_teachers(job, world, probing=True)
        try:
            found = train_opd.probe(run)
        except ValueError as error:
            found = str(error)
        run.teachers.stop()
        train_opd.connect_teachers(job, world, probing=False).stop()
        return found

    return [found for found in live(path, ranks, on_student) if found is not None]


@pytest.mark.parametrize("dtype, limit", [("float32", "1e-06"), ("bfloat16", "5e-03")])
@pytest.mark.parametrize("ranks, teacher_ranks", [(4, 2), (2, 0)])
def test_the_probe_passes_on_the_real_path(tmp_path, dtype, limit, ranks, teacher_ranks):
    """Catches a limit so tight, or a path so noisy, that every run would be refused."""
    path = write_config(tmp_path, topology__teacher_ranks=teacher_ranks, student__dtype=dtype, teacher__dtype=dtype)
    for found in run_probe(path, ranks):
        assert "passed" in found and f"limit {limit}" in found


@pytest.mark.parametrize("fault", ["shift", "temperature"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks, teacher_ranks", [(3, 1), (2, 0)])
def test_the_probe_sees_a_planted_fault_of_the_teacher_side(tmp_path, monkeypatch, fault, dtype, ranks, teacher_ranks):
    """Catches a probe that cannot fail: a shift by one position and a temperature of 1.1 must stop the job."""
    original = teacher_module.answer

    def faulty(model, request, *, vocab_size, temperature, chunk_size):
        if fault == "temperature":
            temperature *= 1.1
        else:
            request = teacher_module.Request(request.tokens_BT.roll(1, dims=1), *list(vars(request).values())[1:])
        return original(model, request, vocab_size=vocab_size, temperature=temperature, chunk_size=chunk_size)

    monkeypatch.setattr(teacher_module, "answer", faulty)
    path = write_config(tmp_path, topology__teacher_ranks=teacher_ranks, student__dtype=dtype, teacher__dtype=dtype)
    for found in run_probe(path, ranks):
        assert "the teacher side disagrees" in found
        assert ("temperature is off by" in found) == (fault == "temperature") or fault == "shift"


def test_the_probe_blames_the_student_side_when_its_sampler_differs(tmp_path, monkeypatch):
    """Catches a message that sends people to look at the teacher while the replica is stale."""
    monkeypatch.setattr(train_opd, "gather_into", lambda model, replica: [p.data.normal_() for p in replica.parameters()])
    [found] = run_probe(write_config(tmp_path, topology__teacher_ranks=0), 1)
    assert "training forward and its sampler disagree" in found


# --- run, resume, alarms --------------------------------------------------------------------------------------------

def curve(path, keys=("loss", "grad_norm", "tokens", "student_mass", "eval/reverse_kl_full")):
    return [(line["step"], line["kind"], *(line.get(key) for key in keys)) for line in read_jsonl(path) if line["kind"] != "event"]


def weights_of(folder):
    from distill_core.checkpoint import open_checkpoint, read_tensor
    saved = open_checkpoint(folder)
    return {name: read_tensor(saved, name) for name in saved.tensors}


@pytest.mark.parametrize("ranks, teacher_ranks", [(4, 2), (2, 0)])
def test_six_steps_equal_three_and_three(tmp_path, ranks, teacher_ranks):
    """Catches any state that a resume forgets: moments, step counts, data position, sampling stream, schedules."""
    path = write_config(tmp_path, topology__teacher_ranks=teacher_ranks, optim__warmup_steps=2)
    whole_run(path, ranks, ["name=straight"])
    whole_run(path, ranks, ["name=split", "max_steps=3"])
    assert (tmp_path / "runs/split/DONE").exists()
    whole_run(path, ranks, ["name=split"])
    straight, split = (curve(tmp_path / f"runs/{name}/metrics.jsonl") for name in ("straight", "split"))
    assert straight == split and [row[0] for row in straight if row[1] == "train"] == list(range(1, 7))
    a, b = (weights_of(tmp_path / f"runs/{name}/checkpoints/step_00000006") for name in ("straight", "split"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    whole_run(path, ranks, ["name=other", "seed=1"])  # negative control
    assert curve(tmp_path / "runs/other/metrics.jsonl") != straight


def test_resume_at_another_world_size(tmp_path):
    """Catches state bound to a number of ranks: the next steps must see the same prompts and give the same losses."""
    path = write_config(tmp_path, topology__teacher_ranks=1, eval__every=0, data__eval=None)
    whole_run(path, 4, ["name=straight"])  # 3 students
    whole_run(path, 4, ["name=moved", "max_steps=3"])
    whole_run(path, 1, ["name=moved", "topology.teacher_ranks=0"])  # 1 student, teacher inline
    straight, moved = (curve(tmp_path / f"runs/{name}/metrics.jsonl")[3:] for name in ("straight", "moved"))
    assert [row[0] for row in straight] == [row[0] for row in moved] == [4, 5, 6]
    first, third = (straight[0], moved[0]), (straight[2], moved[2])
    assert first[0][4] == first[1][4], "the same number of tokens: the same samples"
    assert first[1][2] == pytest.approx(first[0][2], abs=1e-5) and first[1][3] == pytest.approx(first[0][3], abs=1e-4)
    assert third[1][2] == pytest.approx(third[0][2], abs=1e-4)


def test_drift_is_refused_with_both_values_and_free_keys_are_free(tmp_path):
    """Catches a run that silently continues with another learning rate or other data."""
    path = write_config(tmp_path, topology__teacher_ranks=0, eval__every=0, data__eval=None)
    whole_run(path, 1, ["max_steps=2"])
    whole_run(path, 1, ["max_steps=3", "train.micro_batch_tokens=100", "checkpoint.every=1", "metrics.log_every=2"])
    with pytest.raises(Exception, match=r"optim\.lr.*0\.001.*0\.5|optim\.lr"):
        whole_run(path, 1, ["max_steps=4", "optim.lr=0.5"])
    whole_run(path, 1, ["max_steps=4", "optim.lr=0.5", "checkpoint.allow_drift=[optim.lr]"])
    manifest = json.loads((tmp_path / "runs/tiny/checkpoints/step_00000004/manifest.json").read_text())
    assert manifest["state"]["allowed_drift"] == ["optim.lr"]
    write_prompts(tmp_path / "train.jsonl", 40, seed=9)
    with pytest.raises(Exception, match=r"data\.train\.sha256"):
        whole_run(path, 1, ["max_steps=5", "optim.lr=0.5"])


def test_a_swapped_teacher_is_refused(tmp_path):
    """Catches a resume that goes on with another teacher of the same shape as if nothing had happened."""
    path = write_config(tmp_path, topology__teacher_ranks=0, eval__every=0, data__eval=None)
    whole_run(path, 1, ["max_steps=1"])
    write_lm(tmp_path / "other", seed=7)
    with pytest.raises(Exception, match=r"teacher\.weights"):
        whole_run(path, 1, ["max_steps=2", f"teacher.path={tmp_path / 'other'}"])
    (tmp_path / "teacher").rename(tmp_path / "moved")
    whole_run(path, 1, ["max_steps=2", f"teacher.path={tmp_path / 'moved'}"])  # the same one elsewhere is fine


FREE = {"name", "run_root", "max_steps", "device", "student.path", "student.activation_checkpointing", "teacher.path",
        "teacher.name", "teacher.ranks", "rollout.balance", "teacher.chunk_size", "teacher.param_offload", "topology.world_size", "topology.teacher_ranks",
        "topology.timeout_s", "data.train", "data.eval", "rollout.batch_size", "loss.chunk_size",
        "train.micro_batch_tokens"}


def test_every_option_is_either_free_or_in_the_fingerprint(tmp_path):
    """Catches an option that changes the computation and may drift silently, and one that locks a run for no reason."""
    job = train_opd.prepare(cfg.load(write_config(tmp_path)), 3, 3)
    prints, sections = train_opd.fingerprints(job), ("eval.", "probe.", "alarms.", "checkpoint.", "metrics.")
    for option in cfg.flatten(job.config):
        free = option in FREE or option.startswith(sections)
        assert (option in prints) != free, option
    linear = train_opd.prepare(cfg.load(write_config(tmp_path, optim__schedule="linear")), 3, 3)
    assert train_opd.fingerprints(linear)["max_steps"] == 6, "a decaying schedule depends on its end"


def test_a_refused_start_leaves_the_finished_run_as_it_was(tmp_path, monkeypatch, capfd):
    """Catches a typo that overwrites config.yaml or removes DONE before it is refused."""
    path = write_config(tmp_path, topology__teacher_ranks=0, eval__every=0, data__eval=None, max_steps=1)
    whole_run(path, 1)
    before = {p.name: p.read_bytes() for p in (tmp_path / "runs/tiny").iterdir() if p.is_file()}
    for flag in (["--check"], []):
        monkeypatch.setattr(sys, "argv", ["train_opd.py", "--config", str(path), *flag, "optim.lr=0.5"])
        assert train_opd.main() == 2 and "optim.lr" in capfd.readouterr().err
    after = {p.name: p.read_bytes() for p in (tmp_path / "runs/tiny").iterdir() if p.is_file()}
    after.pop("error.txt"), after.pop(".lock", None), before.pop(".lock", None)
    assert after == before


def test_an_evaluation_that_a_stop_has_cut_off_is_made_up_for(tmp_path):
    """Catches a curve without its last point because the run was preempted at that very step."""
    path = write_config(tmp_path, topology__teacher_ranks=0, eval__every=2, max_steps=4)

    def on_student(job, world):
        log = open_run(job.run_dir, cfg.to_yaml(job.config), world.rank)
        log.handlers = []
        stop = StopRequest(job.run_dir)
        stop.wanted = lambda: (job.run_dir / "metrics.jsonl").read_text().count('"train"') == 2
        train_opd.train(job, world, log, stop)

    live(path, 1, on_student)
    assert (tmp_path / "runs/tiny/PREEMPTED").exists()
    whole_run(path, 1)
    evals = [row[0] for row in curve(tmp_path / "runs/tiny/metrics.jsonl") if row[1] == "eval"]
    assert evals == [0, 2, 4] and (tmp_path / "runs/tiny/DONE").exists()


def test_a_stop_file_checkpoints_and_the_next_start_continues(tmp_path):
    """Catches a preemption that loses steps, or that teacher ranks do not hear of."""
    path = write_config(tmp_path, topology__teacher_ranks=1)

    def on_student(job, world):
        log = open_run(job.run_dir, cfg.to_yaml(job.config), world.rank)
        log.handlers = []
        (job.run_dir / "STOP").touch()
        train_opd.train(job, world, log, StopRequest(job.run_dir))

    live(path, 3, on_student)
    run_dir = tmp_path / "runs/tiny"
    assert (run_dir / "PREEMPTED").exists() and (run_dir / "checkpoints/step_00000001").is_dir()
    whole_run(path, 3)
    assert (run_dir / "DONE").exists() and not (run_dir / "PREEMPTED").exists() and not (run_dir / "STOP").exists()
    assert [row[0] for row in curve(run_dir / "metrics.jsonl") if row[1] == "train"] == list(range(1, 7))


def test_alarms_warn_or_stop(tmp_path):
    """Catches an alarm that never fires, and a stop that loses the state."""
    path = write_config(tmp_path, topology__teacher_ranks=0, eval__every=0, data__eval=None)
    path_tree = json.loads(path.read_text()) | {"alarms": {"truncated_frac": {"limit": 0.1}, "student_mass": {"limit": 0.999, "action": "stop"}}}
    path.write_text(json.dumps(path_tree))
    with pytest.raises(Exception, match="stopped by an alarm at step 1"):
        whole_run(path, 1)
    events = [line["message"] for line in read_jsonl(tmp_path / "runs/tiny/metrics.jsonl") if line["kind"] == "event"]
    assert any("truncated_frac" in event for event in events) and any("student_mass" in event for event in events)
    assert (tmp_path / "runs/tiny/checkpoints/step_00000001").is_dir()


class FakeJournal:
    def __init__(self):
        self.events = []

    def event(self, step, event, message):
        self.events.append(message)


@pytest.mark.parametrize("values, fires", [
    ({"student_mass": 0.49}, "student_mass"), ({"student_mass": 0.51}, None),
    ({"student_entropy": 1.0, "teacher_entropy": 4.2}, "entropy_gap"), ({"student_entropy": 1.0, "teacher_entropy": 2}, None),
    ({"student_entropy": 5.0, "teacher_entropy": 1.0}, "entropy_gap"),
    ({"truncated_frac": 0.95}, "truncated_frac"), ({"truncated_frac": 0.5}, None), ({"repetition_frac": 0.6}, "repetition_frac"),
    ({"teacher_nonfinite": 1.0}, "teacher_nonfinite"), ({"teacher_nonfinite": 0.0}, None), ({}, None)])
def test_each_alarm_fires_beyond_its_limit_only(tmp_path, values, fires):
    """Catches an alarm with its sign turned round, one that watches nothing, and one that repeats itself each step."""
    job = train_opd.prepare(cfg.load(write_config(tmp_path)), 3, 3)
    run, journal = train_opd.Run(job, None, logging.getLogger("test"), None, None, None), FakeJournal()
    stops = [train_opd.check_alarms(run, values, journal) for _ in range(3)]
    assert [event.split(" ")[0] for event in journal.events] == ([fires] if fires else [])
    assert stops == [fires == "teacher_nonfinite"] * 3


def test_nan_from_the_teacher_skips_the_step_and_stops_the_run(tmp_path, monkeypatch):
    """Catches a teacher's NaN that trains the student, or that only shows as a skipped step."""
    original = teacher_module.answer

    def broken(model, request, **settings):
        reply = original(model, request, **settings)
        bad = torch.full_like(reply.logits_NK, float("nan"))
        return reply._replace(logits_NK=bad, num_nonfinite=bad.numel())

    monkeypatch.setattr(teacher_module, "answer", broken)
    path = write_config(tmp_path, topology__teacher_ranks=1, eval__every=0, data__eval=None, probe__enabled=False)
    with pytest.raises(Exception, match="stopped by an alarm at step 1|closed|failed"):
        whole_run(path, 2)
    lines = read_jsonl(tmp_path / "runs/tiny/metrics.jsonl")
    [step] = [line for line in lines if line["kind"] == "train"]
    assert step["step_applied"] == 0 and step["teacher_nonfinite"] > 0
    assert any("teacher_nonfinite" in line.get("message", "") for line in lines)
    before, after = load_lm(tmp_path / "student"), weights_of(tmp_path / "runs/tiny/checkpoints/step_00000001")
    assert all(torch.equal(after[f"student.{name}"], p) for name, p in before.named_parameters())


def test_evaluation_uses_its_own_sampling_and_fresh_randomness(tmp_path, monkeypatch):
    """Catches an evaluation at the training temperature, on the training stream, or on the same samples every time."""
    path = write_config(tmp_path, topology__teacher_ranks=0, eval__n=3, eval__temperature=0.6, eval__top_p=0.8)
    calls, original = [], Engine.stream

    def spy(engine, prompts, **settings):
        calls.append(settings)
        return original(engine, prompts, **settings)

    def on_student(job, world):
        run = train_opd.build_student(job, world, logging.getLogger("test"))
        run.teachers = train_opd.connect_teachers(job, world, probing=False)
        job.run_dir.mkdir(parents=True)
        monkeypatch.setattr(Engine, "stream", spy)
        for run.step in (0, 3):
            train_opd.evaluate(run)
        return [(c["temperature"], c["top_p"], c["n"], c["max_new_tokens"], c["seed"], c["step"]) for c in calls]

    [seen] = live(path, 1, on_student)
    assert seen == [(0.6, 0.8, 3, 5, 1, 0), (0.6, 0.8, 3, 5, 1, 3)]


def test_mean_and_pass_at_n(tmp_path):
    """Catches pass@n that wants all samples right, grades of the wrong prompt's samples, unanswered prompts counted."""
    job = train_opd.prepare(cfg.load(write_config(tmp_path, eval__n=2)), 3, 3)
    run, metrics = train_opd.Run(job, None, logging.getLogger("test"), None, None, None), Metrics()
    prompts = [train_opd.Prompt((65,), answer) for answer in ("1", None, "2", "3")]
    train_opd.record_answers(run, prompts, ["1", "9", "1", "1", "9", "2", "9", "9"], metrics)
    assert metrics.reduce() == pytest.approx({"eval/exact_match": 1 / 3, "eval/mean_at_n": 1 / 3, "eval/pass_at_n": 2 / 3})


def test_answers_are_not_read_by_training(tmp_path):
    """Catches a reward in disguise: with other answers, or none, the curve is the same bit for bit."""
    path = write_config(tmp_path, topology__teacher_ranks=0, max_steps=2)
    whole_run(path, 1, ["name=none"])
    write_prompts(tmp_path / "train.jsonl", 40, answers=True)
    whole_run(path, 1, ["name=answers"])
    assert curve(tmp_path / "runs/none/metrics.jsonl") == curve(tmp_path / "runs/answers/metrics.jsonl")


def test_a_run_leaves_a_complete_folder(tmp_path):
    """Catches missing logs, metrics, samples or report, and samples that leak the stop token into text."""
    whole_run(write_config(tmp_path, eval__n=3, eval__temperature=1.0), 3)
    run_dir = tmp_path / "runs/tiny"
    names = {p.name for p in run_dir.iterdir()}
    assert {"config.yaml", "command.txt", "metrics.jsonl", "report.html", "log_rank0.txt", "samples", "checkpoints", "DONE"} <= names
    lines = read_jsonl(run_dir / "metrics.jsonl")
    evals = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evals] == [0, 3, 6]
    assert {"eval/exact_match", "eval/mean_at_n", "eval/pass_at_n", "eval/reverse_kl_full", "eval/response_length"} <= set(evals[0])
    assert sorted(p.name for p in (run_dir / "samples").iterdir()) == [f"step_{step:08d}.jsonl" for step in (0, 3, 6)]
    assert cfg.load(run_dir / "config.yaml") == cfg.load(tmp_path / "config.yaml", ["eval.n=3"])


# --- bad input ------------------------------------------------------------------------------------------------------

def bad(tmp_path, name):
    """(overrides, what the one line must say) after planting the fault."""
    if name == "missing shard":
        sorted((tmp_path / "teacher").glob("model-*.safetensors"))[0].unlink()
        return [], "teacher/model-00001"
    if name == "index leaves folder":
        index = tmp_path / "student/model.safetensors.index.json"
        index.write_text(index.read_text().replace("model-00001", "../model-00001"))
        return [], "student/model.safetensors.index.json"
    if name == "wrong shape":
        raw = json.loads((tmp_path / "teacher/config.json").read_text())
        (tmp_path / "teacher/config.json").write_text(json.dumps(raw | {"hidden_size": 36}))
        return [], "teacher"
    if name == "tokenizers differ":
        for role in ("student", "teacher"):
            (tmp_path / role / "tokenizer.json").write_text(json.dumps(
                {"model": {"type": "BPE", "vocab": {"a": 0, role: 1}, "merges": []}, "added_tokens": []}))
        return ["data.tokenizer=auto"], "different tokenizers"
    if name == "malformed line":
        with open(tmp_path / "train.jsonl", "a") as file:
            file.write('{"prompt": \n')
        return [], "train.jsonl:41"
    return {"unknown key": (["optim.lrr=1"], "optim.lr"), "wrong type": (["max_steps=many"], "max_steps"),
            "missing file": (["data.train=nothing.jsonl"], "nothing.jsonl"), "no folder": (["teacher.path=nowhere"], "nowhere"),
            "k too small": (["loss.top_k=1"], "loss.top_k"), "k too large": (["loss.top_k=999"], "loss.top_k"),
            "no prompts left": (["data.max_prompt_tokens=2"], "no prompts left"),
            "too few prompts": (["train.prompts_per_step=64"], "prompts_per_step"),
            "teacher ranks": (["topology.world_size=2", "topology.teacher_ranks=2"], "teacher_ranks"),
            "stop id": (["rollout.stop_ids=[9999]"], "stop_ids")}[name]


@pytest.mark.parametrize("name", ["unknown key", "wrong type", "missing file", "no folder", "missing shard", "index leaves folder",
                                  "wrong shape", "tokenizers differ", "k too small", "k too large", "no prompts left",
                                  "too few prompts", "malformed line", "teacher ranks", "stop id"])
def test_bad_input_gets_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, name):
    """Catches tracebacks, exit code 1, and faults that are only found after the ranks have started."""
    path = write_config(tmp_path, topology__world_size=3)
    overrides, message = bad(tmp_path, name)
    monkeypatch.setattr(sys, "argv", ["train_opd.py", "--config", str(path), "--check", *overrides])
    assert train_opd.main() == 2
    captured = capsys.readouterr()
    assert message in captured.err and len(captured.err.strip().splitlines()) == 1 and captured.out == ""


def test_check_passes_and_writes_nothing(tmp_path, monkeypatch, capsys):
    """Catches a check that leaves a run folder behind, or that never looks at the files."""
    path = write_config(tmp_path, topology__world_size=3)
    monkeypatch.setattr(sys, "argv", ["train_opd.py", "--config", str(path), "--check"])
    assert train_opd.main() == 0 and "40 training and 6 evaluation prompts" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_what_does_not_fit_is_refused_before_loading(tmp_path):
    """Catches an out-of-memory error after minutes of loading."""
    job = train_opd.prepare(cfg.load(write_config(tmp_path)), 3, 3)
    parts = train_opd.job_memory(job)["student"]
    for available in (1000, sum(parts.values()) - 1):  # the last one holds each part, but not their sum
        with pytest.raises(ValueError, match="a student rank needs about"):
            train_opd.check_memory(job, available)
    train_opd.check_memory(job, sum(parts.values()))
    with pytest.raises(ValueError, match=r"rollout\.batch_size=[1-3] would fit"):
        train_opd.check_memory(job, sum(parts.values()) - parts["KV cache"] // 3)
    longer = train_opd.prepare(cfg.load(write_config(tmp_path, eval__max_new_tokens=9999)), 3, 3)
    assert train_opd.job_memory(longer)["student"]["KV cache"] > 10 * parts["KV cache"]
