"""The trainer: no leak, the same forward as inference, acceptance as decoding has it, resuming, and that it learns."""

import gzip
import json

import pytest
import torch
from accelerate import Accelerator
from stubs import VOCAB, make_context, make_drafter, make_target

from hf_ddtree import DDTreeConfig
from hf_ddtree.drafting import DDTreeCandidateGenerator
from hf_ddtree.training.data import HELD_EVERY, TokenSequence, compute_features, read_sequences
from hf_ddtree.training.evaluation import held_acceptance, held_configs
from hf_ddtree.training.features import FeatureStore
from hf_ddtree.training.initialise import drafter_from_target
from hf_ddtree.training.objective import BlockLoss, RestrictedHead, build_batch, draft_hidden_states, row_weights
from hf_ddtree.training.trainer import Trainer, TrainingData, TrainingSettings

PROMPT = 6


@pytest.fixture(scope="module")
def target():
    return make_target("llama")


def greedy_text(target, count, length=24):
    """Greedy answers of `target` to random prompts, as sequences."""
    prompts = torch.randint(2, VOCAB, (count, PROMPT), generator=torch.Generator().manual_seed(3))
    rows = target.generate(prompts, do_sample=False, max_new_tokens=length, attention_mask=torch.ones_like(prompts))
    return [TokenSequence(row, PROMPT, None) for row in rows]


@pytest.fixture(scope="module")
def features(target):
    return compute_features(target, greedy_text(target, 12), [0, 2])


def test_fault_65_a_block_sees_nothing_at_or_after_its_anchor(target, features):
    drafter = make_drafter(target)
    item = features[0]
    batch = build_batch([item], torch.tensor([[10, 12]]), 8, 5)
    batch.context.requires_grad_(True)
    hidden = draft_hidden_states(drafter, target.get_input_embeddings(), batch)
    (gradient,) = torch.autograd.grad(hidden[0, 1].sum(), batch.context)
    seen = gradient[0].abs().sum(-1) > 0
    assert seen.tolist() == [True] * 12 + [False] * (len(seen) - 12)


def test_fault_40_training_and_inference_draft_the_same(target, features):
    drafter = make_drafter(target)
    item, anchor = features[0], 13
    batch = build_batch([item], torch.tensor([[9, anchor]]), 8, 5)
    with torch.no_grad():
        trained = target.lm_head(draft_hidden_states(drafter, target.get_input_embeddings(), batch)[0, 1])
        generator = DDTreeCandidateGenerator(drafter, target, DDTreeConfig())
        context = make_context(item.context[None, :anchor])
        drafted = generator.draft_block(item.sequence.tokens[None, anchor : anchor + 1], context)[0][0]
    torch.testing.assert_close(trained, drafted)


def test_loss_is_the_plain_cross_entropy(target, features):
    """And so are its gradients; positions with a parent go through the transition, the first depth never."""
    drafter = make_drafter(target, transition_rank=4)
    torch.nn.init.normal_(drafter.transition.up_proj.weight)
    embedding, batch = target.get_input_embeddings(), build_batch(features[:2], torch.tensor([[8, 11], [7, 20]]), 8, 5)
    with_parent = torch.rand(batch.labels.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    known = batch.labels >= 0

    hidden = draft_hidden_states(drafter, embedding, batch)
    parents = torch.cat([batch.labels[:, :, :1], batch.labels[:, :, :-1]], dim=-1).clamp(min=0)
    seen = with_parent & (torch.arange(7) > 0)
    changed = torch.where(seen[..., None], hidden + drafter.transition(hidden, embedding(parents)), hidden)
    weights = torch.exp(-torch.arange(7.0) / 4).expand(2, 2, 7)[known]
    soft = 0.8 * target.lm_head(batch.final[known]).softmax(-1)
    soft = soft + 0.2 * torch.nn.functional.one_hot(soft.argmax(-1), VOCAB)
    losses = torch.nn.functional.cross_entropy(target.lm_head(changed[known]), soft.detach(), reduction="none")
    expected = (weights * losses).sum() / weights.sum()

    head = RestrictedHead(target, torch.arange(VOCAB))
    total = float(row_weights(head.columns(batch.labels), 4.0).sum())
    loss = BlockLoss(drafter, embedding, head, distillation=0.8, decay=4.0)(batch, with_parent, total)
    torch.testing.assert_close(loss, expected)
    parameters = list(drafter.parameters())
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters))


def test_held_acceptance_is_what_decoding_has(target, features):
    drafter = make_drafter(target)
    predicted = held_acceptance(drafter, target, features, held_configs(drafter))["tree-16"]
    committed = rounds = 0
    for item in features:
        answer = item.sequence.answer_length
        config = DDTreeConfig(tree_budget=16, max_new_tokens=answer, do_sample=False, return_dict_in_generate=True)
        prompt = item.sequence.tokens[None, :PROMPT]
        result = target.generate(prompt, assistant_model=drafter, generation_config=config)
        assert result.sequences[0].tolist() == item.sequence.tokens.tolist()
        committed += sum(result.acceptance_lengths[1:])
        rounds += result.rounds - 1
    assert predicted == pytest.approx(committed / rounds)


def make_trainer(target, features, out, accelerator=None, **settings):
    torch.manual_seed(0)
    drafter = drafter_from_target(target, 2, block_size=8, mask_token_id=5, target_layer_ids=[0, 1], transition_rank=8)
    settings = {"steps": 150, "minutes": None, "rows": 4, "blocks": 8, "min_count": 1, **settings}
    store = FeatureStore(target, [item.sequence for item in features], [0, 1], None, 0)
    data = TrainingData(store, features[:4])
    return Trainer(drafter, target, data, out, TrainingSettings(**settings), accelerator or Accelerator(cpu=True))


@pytest.fixture(scope="module")
def tapped(target):
    return compute_features(target, greedy_text(target, 12), [0, 1])


def test_it_learns_a_small_text(target, tapped, tmp_path):
    trainer = make_trainer(target, tapped, tmp_path)
    before = held_acceptance(trainer.drafter, target, tapped, held_configs(trainer.drafter))["tree-16"]
    losses = [trainer.train_step() for _ in range(150)]
    after = trainer.evaluate()["tree-16"]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert after > before + 0.5
    assert json.loads((tmp_path / "log.jsonl").read_text())["tree-16"] == after


def test_a_resumed_run_goes_on_as_if_never_stopped(target, tapped, tmp_path):
    whole = make_trainer(target, tapped, tmp_path / "whole")
    losses = [whole.train_step() for _ in range(6)]
    first = make_trainer(target, tapped, tmp_path / "parts")
    assert [first.train_step() for _ in range(3)] == losses[:3]
    first.save()
    second = make_trainer(target, tapped, tmp_path / "parts")
    assert second.resume()
    assert [second.train_step() for _ in range(3)] == losses[3:]


def test_a_diverging_run_says_so(target, tapped, tmp_path):
    trainer = make_trainer(target, tapped, tmp_path)
    with torch.no_grad():
        trainer.drafter.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="--learning-rate"):
        trainer.train_step()


@pytest.mark.parametrize("broken", ["norm of the gradient", "weights"])
def test_exploded_weights_do_not_replace_a_checkpoint(broken, target, tapped, tmp_path, monkeypatch):
    make_trainer(target, tapped, tmp_path).save()
    before = (tmp_path / "checkpoint.pt").read_bytes()
    trainer = make_trainer(target, tapped, tmp_path, steps=10, learning_rate=1e30 if broken == "weights" else 1e-2)
    if broken == "norm of the gradient":
        monkeypatch.setattr(Accelerator, "clip_grad_norm_", lambda self, parameters, most: torch.tensor(torch.inf))
    with pytest.raises(FloatingPointError, match=r"loss is .* norm of its gradient (inf|nan)"):
        trainer.run()
    assert trainer.schedule.step == (1 if broken == "weights" else 0)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_looking_at_the_next_step_changes_nothing(target, tapped, tmp_path):
    plain, looking = (make_trainer(target, tapped, tmp_path / name) for name in ("plain", "looking"))
    losses = [plain.train_step() for _ in range(4)]
    for loss in losses:
        looking._check_next_step()
        assert looking.train_step() == loss


def write_lines(path, rows):
    with gzip.open(path, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def test_data_is_split_by_line_number(tmp_path):
    rows = [{"p": [1, n], "g": [2, 3], "t": None} for n in range(2 * HELD_EVERY + 1)]
    write_lines(tmp_path / "text.jsonl.gz", rows)
    train, held = read_sequences(tmp_path / "text.jsonl.gz")
    assert [int(s.tokens[1]) for s in held] == [0, HELD_EVERY, 2 * HELD_EVERY]
    assert len(train) == 2 * HELD_EVERY - 2
    assert train[0].prompt_length == 2 and train[0].answer_length == 2


@pytest.mark.parametrize("rows", [[], [{"p": [1], "g": [2], "t": None}]])
def test_too_little_data_is_refused(rows, tmp_path):
    write_lines(tmp_path / "text.jsonl.gz", rows)
    with pytest.raises(ValueError, match="at least 2"):
        read_sequences(tmp_path / "text.jsonl.gz")


@pytest.mark.parametrize("line", [{"p": [1]}, {"p": "ab", "g": [2], "t": None}, {"p": [], "g": [2], "t": None}, [1]])
def test_a_broken_line_is_named(line, tmp_path):
    write_lines(tmp_path / "text.jsonl.gz", [{"p": [1], "g": [2], "t": None}, line])
    with pytest.raises(ValueError, match="line 2"):
        read_sequences(tmp_path / "text.jsonl.gz")


def test_a_checkpoint_of_another_drafter_is_refused(target, tapped, tmp_path):
    make_trainer(target, tapped, tmp_path).save()
    other = make_trainer(target, tapped, tmp_path)
    other.drafter.config.mask_token_id = 9
    with pytest.raises(ValueError, match=r"--mask-token-id.*--no-resume"):
        other.resume()


@pytest.mark.parametrize(("layers", "block", "named"), [(0, 8, "--layers"), (4, 8, "--layers"), (2, 1, "--block-size")])
def test_shapes_that_do_not_fit_are_refused(target, layers, block, named):
    with pytest.raises(ValueError, match=named):
        drafter_from_target(target, layers, block_size=block, mask_token_id=5)


def test_biases_of_the_target_are_copied():
    drafter = drafter_from_target(
        make_target("llama", attention_bias=True), 2, block_size=8, mask_token_id=5, target_layer_ids=[0, 1]
    )
    assert drafter.config.attention_bias and drafter.layers[0].self_attn.q_proj.bias is not None
