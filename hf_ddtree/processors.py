"""Logits processors over a whole tree, and plain decoding's view of the keyed noise."""

from collections.abc import Iterable
from copy import copy

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process

from .noise import check_seed, gumbel_noise, row_streams, stream_key
from .tree import Tree


def _classes(*names: str) -> set[type]:
    return {getattr(logits_process, name) for name in names}


# Exact types: a subclass may do anything.
CONTEXT_FREE = _classes(
    *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper"),
    *("EpsilonLogitsWarper", "EtaLogitsWarper", "TopHLogitsWarper", "SuppressTokensLogitsProcessor"),
    *("InfNanRemoveLogitsProcessor", "LogitNormalization"),
)
BY_ROW = _classes(  # a row's result depends on that row's ids and scores alone
    *("RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor"),
    *("NoBadWordsLogitsProcessor", "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"),
    *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty"),
    *("SuppressTokensAtBeginLogitsProcessor", "WatermarkLogitsProcessor"),
)
BY_SEQUENCE = _classes(  # know the rows of the batch by their index
    *("EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor"),
)
BEFORE_NOISE = (
    *("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    "watermarking_config",
)


def outside(processors: Iterable[LogitsProcessor], *known: set[type]) -> list[str]:
    """Names of the processors that are of none of the `known` kinds."""
    return [type(processor).__name__ for processor in processors if _kind(processor) not in known]


def _kind(processor: LogitsProcessor) -> set[type] | None:
    kind = next((kind for kind in (CONTEXT_FREE, BY_ROW, BY_SEQUENCE) if type(processor) in kind), None)
    if kind is BY_ROW and isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
        return BY_SEQUENCE  # the penalty on a padded prompt knows each sequence's padding
    return kind


def knows_whole_batch(processors: Iterable[LogitsProcessor]) -> bool:
    """Whether a processor may look at several rows at once, or keep state of them."""
    return bool(outside(processors, CONTEXT_FREE, BY_ROW, BY_SEQUENCE))


def for_row(processors: LogitsProcessorList, row: int, rows: int) -> LogitsProcessorList:
    """The processors as row `row` of a batch of `rows` would have them alone; those known by `outside`."""
    return LogitsProcessorList([_alone(each, row, rows) if _kind(each) is BY_SEQUENCE else each for each in processors])


def _alone(processor: LogitsProcessor, row: int, rows: int) -> LogitsProcessor:
    """A copy that knows one row only. The encoder's processors know prompts, each of which may have several rows."""
    alone = copy(processor)
    if isinstance(processor, logits_process.EncoderNoRepeatNGramLogitsProcessor):
        prompt = row * processor.batch_size // rows
        alone.generated_ngrams, alone.batch_size = [processor.generated_ngrams[prompt]], 1
        return alone
    is_penalty = isinstance(processor, logits_process.EncoderRepetitionPenaltyLogitsProcessor)
    name = "encoder_input_ids" if is_penalty else "prompt_ignore_length"
    entries = getattr(processor, name)
    prompt = row * len(entries) // rows
    setattr(alone, name, entries[prompt : prompt + 1])
    return alone


def process_tree(processors: LogitsProcessorList, ids: torch.Tensor, tree: Tree, scores: torch.Tensor) -> torch.Tensor:
    """Scores [nodes, vocab] of all nodes of a one-row tree, each as plain decoding would have them after its path.

    Context-free processors get all nodes at once, those that look at the ids get the nodes of one depth, whose paths
    are equally long, and those that know rows by their index get node after node.

    Args:
        processors: of the classes above; no others, since they may keep state.
        ids: [1, length] the committed ids, the root included.
        scores: raw logits of the nodes, float32; may be overwritten.
    """
    depths = None
    for processor in processors:
        if _kind(processor) is CONTEXT_FREE:
            scores = processor(ids, scores)
            continue
        if depths is None:  # the one copy to the host, which only these processors cost
            depths, tokens = tree.depths[0].tolist(), tree.path_tokens()[0]
        nodes = range(len(depths))
        if _kind(processor) is BY_ROW:
            groups = [[node for node in nodes if depths[node] == depth] for depth in range(max(depths) + 1)]
        else:
            groups = [[node] for node in nodes]
        processed = torch.empty_like(scores)
        for group in groups:
            path = torch.cat([ids.expand(len(group), -1), tokens[group, : depths[group[0]]]], dim=1)
            processed[group] = processor(path, scores[group])
        scores = processed
    return scores


class KeyedNoiseLogitsProcessor(LogitsProcessor):
    """Adds the noise that DDTree sampling adds, so that plain greedy decoding samples the same text.

        warpers = plain_sampling_processors(model, config)  # ends with this processor
        model.generate(**inputs, do_sample=False, logits_processor=warpers)

    gives token for token what `config`, with the same seed, gives with a drafter. It must come last, after the warpers.

    Args:
        seed: as `DDTreeConfig.seed`.
        attention_mask: [batch, length] of the prompt's ids, where they have padding: positions count real tokens only.

    Raises:
        ValueError: the seed is none, or there are not as many seeds or masks as sequences.
    """

    def __init__(self, seed: int | list[int], attention_mask: torch.Tensor | None = None):
        check_seed(seed)
        self.seed = seed
        self.padding = None if attention_mask is None else (attention_mask == 0).sum(-1).tolist()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [batch, vocab] as float64, the noise added."""
        batch, length = input_ids.shape
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        streams = row_streams(self.seed, batch)
        padding = self.padding or [0] * batch
        if len(padding) != batch:
            raise ValueError(f"`attention_mask` has {len(padding)} rows for {batch} sequences; give one row each.")
        noise = [
            gumbel_noise(stream_key(*stream), tokens.new_tensor(length - pads), tokens)
            for stream, pads in zip(streams, padding, strict=True)
        ]
        return scores.double() + torch.stack(noise)


def plain_sampling_processors(
    model: PreTrainedModel,
    config: GenerationConfig,
    attention_mask: torch.Tensor | None = None,
    seed: int | list[int] | None = None,
) -> LogitsProcessorList:
    """What makes plain greedy decoding sample as a `DDTreeConfig` does: its warpers, its watermark, the keyed noise.

    Pass it as `logits_processor=` with `do_sample=False`; penalties and constraints go to `generate` as usual, which
    puts them before these. A watermark must not be given to that call again.

    Args:
        config: a `DDTreeConfig`. Fields it leaves open are filled as `generate` fills them.
        attention_mask: see `KeyedNoiseLogitsProcessor`.
        seed: in place of the config's; a call's `result.seed`, for example.

    Raises:
        ValueError: there is no seed, or the config does not sample by the walk.
    """
    if not config.do_sample:
        raise ValueError(f"`do_sample` is {config.do_sample!r}, so there is no noise to add; set it to True.")
    if (rule := getattr(config, "acceptance", "walk")) != "walk":
        raise ValueError(
            f'`acceptance` is "{rule}", whose text depends on the drafter, so plain decoding cannot have the same; '
            'leave it at "walk".'
        )
    if (seed := getattr(config, "seed", None) if seed is None else seed) is None:
        raise ValueError(
            "`seed` is None, so every call draws its own; set `DDTreeConfig(seed=...)` to compare with it."
        )
    filled, _ = model._prepare_generation_config(config)
    warping = GenerationConfig(do_sample=True, **{name: getattr(filled, name) for name in BEFORE_NOISE})
    warpers = model._get_logits_processor(generation_config=warping, device=model.device)
    return LogitsProcessorList([*warpers, KeyedNoiseLogitsProcessor(seed, attention_mask)])
