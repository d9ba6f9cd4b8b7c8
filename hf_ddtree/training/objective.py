"""The DFlash training objective: random anchors, block-diagonal attention, early positions weighted.

Source: https://arxiv.org/abs/2602.06036, section 4. Other than there, the labels are the target's own, its distribution
and its most probable token, in place of the text's; and some positions are trained with the transition.
"""

from dataclasses import dataclass, fields

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.dflash import DFlashDraftModel, noise_embeddings
from ..models.dflash_config import CAUSAL_LAYER_TYPES, DFlashConfig
from ..models.head import capped, is_plain_linear, logit_scale, logit_softcap
from .data import TargetFeatures


@dataclass(frozen=True)
class BlockBatch:
    """`blocks` noise blocks over each of `rows` sequences, in one drafter forward.

    Attributes:
        noise_ids: [rows, blocks * block_size] anchor token, then mask tokens.
        context: [rows, length, taps * hidden].
        attention_mask: [rows, 1, blocks * block_size, length + blocks * block_size] bool, True = visible: the context
            before the block's anchor, and the block itself.
        position_ids: [rows, length + blocks * block_size].
        labels: [rows, blocks, block_size - 1] the tokens after the anchor; -100 past the end of the sequence.
        final: [rows, blocks, block_size - 1, hidden] the target's state that predicts each label.
    """

    noise_ids: torch.Tensor
    context: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    final: torch.Tensor

    def to(self, device: torch.device) -> "BlockBatch":
        """The same on another device."""
        return BlockBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def build_batch(
    features: list[TargetFeatures], anchors: torch.Tensor, block_size: int, mask_token_id: int
) -> BlockBatch:
    """Lays noise blocks at `anchors` [rows, blocks] (indices of the anchor tokens) over the sequences."""
    pad = nn.utils.rnn.pad_sequence
    tokens = pad([f.sequence.tokens for f in features], batch_first=True, padding_value=-100)
    context = pad([f.context for f in features], batch_first=True)
    final = pad([f.final for f in features], batch_first=True)
    rows, length = tokens.shape
    blocks = anchors.shape[1]

    slots = anchors[:, :, None] + torch.arange(block_size)  # [rows, blocks, block] absolute positions
    noise_ids = torch.full((rows, blocks, block_size), mask_token_id)
    noise_ids[:, :, 0] = tokens.gather(1, anchors)
    predictors = (slots[:, :, :-1].clamp(max=length - 1).flatten(1))[..., None].expand(-1, -1, final.shape[-1])
    labels = labels_after(tokens, anchors, block_size)

    before_anchor = torch.arange(length) < anchors[:, :, None]  # [rows, blocks, length]
    before_anchor = before_anchor.repeat_interleave(block_size, dim=1)
    block_of = torch.arange(blocks).repeat_interleave(block_size)
    same_block = (block_of[:, None] == block_of).expand(rows, -1, -1)
    return BlockBatch(
        noise_ids=noise_ids.flatten(1),
        context=context,
        attention_mask=torch.cat([before_anchor, same_block], dim=-1)[:, None],
        position_ids=torch.cat([torch.arange(length).expand(rows, -1), slots.flatten(1)], dim=1),
        labels=labels,
        final=final.gather(1, predictors.to(final.device)).view(*labels.shape, -1),
    )


def labels_after(tokens: torch.Tensor, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """[rows, blocks, block_size - 1]: the tokens after each anchor; -100 past the end.

    Args:
        tokens: [rows, length], -100 past each row's end. anchors: [rows, blocks].
    """
    future = anchors[:, :, None] + torch.arange(1, block_size)
    inside = future < tokens.shape[1]
    labels = tokens.gather(1, future.clamp(max=tokens.shape[1] - 1).flatten(1)).view_as(future)
    return labels.masked_fill(~inside, -100)


def draft_hidden_states(drafter: DFlashDraftModel, embedding: nn.Module, batch: BlockBatch) -> torch.Tensor:
    """[rows, blocks, block_size - 1, hidden]: the drafter's states that go through the target's head."""
    hidden = drafter(
        noise_embeds=noise_embeddings(embedding, batch.noise_ids),
        context_hidden_states=batch.context,
        attention_mask=layer_masks(drafter.config, batch),
        position_ids=batch.position_ids,
    ).last_hidden_state
    rows, blocks = batch.labels.shape[:2]
    return hidden.view(rows, blocks, -1, hidden.shape[-1])[:, :, 1:]


def layer_masks(config: DFlashConfig, batch: BlockBatch) -> dict[str, torch.Tensor]:
    """The batch's mask for each of the drafter's layer types, as the model itself masks one block after a cache.

    A causal window of W is the slot and W - 1 before it; one that looks both ways reaches W to each side.
    """
    slots = batch.noise_ids.shape[1]
    ahead = batch.position_ids[:, None, None, :] - batch.position_ids[:, None, -slots:, None]  # [rows, 1, slots, keys]
    masks = {}
    for kind in set(config.layer_types or []):
        causal = kind in CAUSAL_LAYER_TYPES[config.causal_layers]
        mask = batch.attention_mask & (ahead <= 0) if causal else batch.attention_mask
        if kind == "sliding_attention":
            mask = mask & ((ahead > -config.sliding_window) if causal else (ahead.abs() <= config.sliding_window))
        masks[kind] = mask
    return masks


class RestrictedHead:
    """The target's head cut to the tokens that occur in the data, to make the loss affordable on a CPU.

    Args:
        target: whose head, logit scale and softcap.
        token_ids: the tokens kept.

    Raises:
        ValueError: the head's weight can't be read.
    """

    def __init__(self, target: PreTrainedModel, token_ids: torch.Tensor):
        head = target.get_output_embeddings()
        if not is_plain_linear(head):
            raise ValueError(
                f"The target's output head is {type(head).__name__}, whose weight can't be read; load the target with "
                "its head in floating point and on one device."
            )
        scale, kept = logit_scale(target.config), token_ids.to(head.weight.device)
        self.weight = head.weight.detach()[kept] * scale
        self.bias = None if head.bias is None else head.bias.detach()[kept].float() * scale
        self.softcap = logit_softcap(target.config)
        self.column = torch.full((head.weight.shape[0],), -1)
        self.column[token_ids] = torch.arange(len(token_ids))

    def columns(self, labels: torch.Tensor) -> torch.Tensor:
        """Where the head has each label; -1 for those that it lacks, and past the end of a sequence."""
        return torch.where(labels >= 0, self.column.to(labels.device)[labels.clamp(min=0)], -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, kept] float32 of states [n, hidden]."""
        logits = (hidden @ self.weight.T).float()
        return capped(logits if self.bias is None else logits.add_(self.bias), self.softcap)


def row_weights(columns: torch.Tensor, decay: float) -> torch.Tensor:
    """Weight of each label [rows, blocks, depth]: `exp(-(k - 1) / decay)` at depth k, 0 where there is no label.

    A miss at an early depth makes all later ones worthless.
    """
    depths = torch.arange(columns.shape[-1], device=columns.device)
    return torch.exp(-depths / decay) * (columns >= 0)


class _HeadCrossEntropy(torch.autograd.Function):
    """Head, softmax and cross entropy in one pass over row chunks that stay in the processor's cache.

    The gradient with respect to the hidden states is found on the way, so no [rows, vocab] tensor is ever kept
    (12 x 32 blocks on 2 cores of an EPYC: loss and its backward 1.7 s as separate operations, 0.6 s like this).
    """

    CHUNK, ACCELERATOR_CHUNK = 128, 4096  # rows

    @staticmethod
    def forward(ctx, hidden, final, head, weights, distillation):
        gradient = torch.empty_like(hidden)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        chunk = _HeadCrossEntropy.CHUNK if hidden.device.type == "cpu" else _HeadCrossEntropy.ACCELERATOR_CHUNK
        for rows in torch.arange(len(hidden), device=hidden.device).split(chunk):
            targets = head.logits(final[rows])
            best = targets.argmax(dim=-1, keepdim=True)
            wanted = targets.softmax(dim=-1).mul_(distillation)
            wanted.scatter_add_(1, best, wanted.new_full(best.shape, 1 - distillation))
            logits = head.logits(hidden[rows])
            log_total = logits.logsumexp(dim=-1, keepdim=True)
            row_losses = log_total.squeeze(1) - (wanted * logits).sum(dim=-1)
            loss += (row_losses * weights[rows]).sum()
            slope = 1.0 if head.softcap is None else 1 - (logits / head.softcap).square()
            excess = (logits - log_total).exp_().sub_(wanted).mul_(weights[rows, None]).mul_(slope)
            gradient[rows] = excess.to(head.weight.dtype) @ head.weight
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None


class BlockLoss(nn.Module):
    """Drafter forward and loss as one module, which is what data parallelism wraps.

    Cross entropy against `distillation` of the target's distribution plus the rest of its most probable token: what
    sampling and what greedy decoding take.

    Args:
        drafter: trained; the embedding and the head are the target's and stay as they are.
        decay: see `row_weights`.
    """

    def __init__(
        self, drafter: DFlashDraftModel, embedding: nn.Module, head: RestrictedHead, distillation: float, decay: float
    ):
        super().__init__()
        self.drafter = drafter
        self.frozen = (embedding, head)  # in a tuple: none of this module's parameters
        self.distillation, self.decay = distillation, decay

    def forward(self, batch: BlockBatch, with_parent: torch.Tensor, total_weight: float) -> torch.Tensor:
        """The loss, divided by `total_weight`: a step's whole weight, whatever share of it this batch is.

        Args:
            with_parent: [rows, blocks, block_size - 1] bool, the positions trained with the transition.
        """
        embedding, head = self.frozen
        columns = head.columns(batch.labels)
        hidden = draft_hidden_states(self.drafter, embedding, batch)
        if self.drafter.transition is not None:
            hidden = add_transition(self.drafter.transition, hidden, embedding, batch.labels, with_parent)
        known = columns >= 0
        weights = row_weights(columns, self.decay)[known] / total_weight
        drafted, wanted = (states[known].to(head.weight.dtype) for states in (hidden, batch.final))
        return _HeadCrossEntropy.apply(drafted, wanted, head, weights, self.distillation)


def add_transition(
    transition: nn.Module,
    hidden: torch.Tensor,
    embedding: nn.Module,
    labels: torch.Tensor,
    with_parent: torch.Tensor,
) -> torch.Tensor:
    """The states [rows, blocks, depth, hidden] with the transition's change where `with_parent` says so.

    The first depth's parent is the anchor, which the drafter sees, so nothing is added there.
    """
    chosen = with_parent & (labels >= 0)
    chosen[:, :, 0] = False
    parents = labels.roll(1, dims=2)[chosen]  # labels end all at once, so a label's parent is one too
    change = transition(hidden[chosen], embedding(parents).to(hidden.dtype))
    return hidden.index_put(torch.where(chosen), change.to(hidden.dtype), accumulate=True)
