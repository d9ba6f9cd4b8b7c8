"""The target's side of a round: prefill, the tree forward, and the commit to its cache."""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.modeling_outputs import ModelOutput

from .acceptance import Accepted
from .attention import TreeMasks, layer_types
from .cache import cache_name, check_room, checked_cache, growing_trees, output_cache
from .compiled import Forwards
from .context import Context
from .tree import Tree, root_tree
from .tree_cache import TreeCache

# Kept by `Target` itself, or meaningful for the prompt only.
HANDLED_KWARGS = {
    *("attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "inputs_embeds"),
    *("output_hidden_states", "output_attentions", "token_type_ids", "mm_token_type_ids", "input_ids"),
    *("image_grid_thw", "video_grid_thw", "second_per_grid_ts"),  # of the pixels dropped by the list
    *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
}
TAPS_BY_LIST = Version(transformers.__version__) >= Version("5.24")
SUPPORTED_ATTENTION = ("eager", "sdpa")


class Target:
    """The target model with its cache, which after every commit holds all of a row's committed tokens but the last.

    Args:
        model: the model that `generate` was called on.
        model_kwargs: as `generate` prepared them.
        target_layer_ids: layers whose outputs the drafter reads.
        compile_mode: how forwards over trees are run, see `Forwards`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        target_layer_ids: list[int],
        compile_mode: str = "off",
    ):
        self.model, self.target_layer_ids = model, target_layer_ids
        self.cache_name = cache_name(model)
        self.has_router = "output_router_logits" in inspect.signature(model.forward).parameters
        self.kwargs = dict(model_kwargs)
        self.cache = checked_cache(model_kwargs.get(self.cache_name))
        self.prompt_mask = model_kwargs.get("attention_mask")  # [batch, prompt]; None = all visible
        self.masks = TreeMasks(model)
        self.forwards = Forwards(compile_mode, model.device)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self.vocab_size = getattr(model.get_input_embeddings(), "num_embeddings", vocab_size)
        self.rows: list[int] = []  # of the batch, those that are live, in the order of trees
        self.root_positions = torch.empty(0)  # [..., batch, 1], as `position_ids`
        self.last_positions = torch.empty(0)  # the same, of the last token that `max_length` leaves to each row
        self.slots = 0  # that will ever be committed
        self.taps: list[torch.Tensor] = []  # of the last forward, [live rows, tokens, hidden] each
        self.after_prefill = True
        self.trees: TreeCache

    @property
    def output_hidden_states(self) -> list[int] | bool:
        """Only the tapped layers; all before transformers 5.24: given a list, 5.17 returns one layer too far."""
        if not self.target_layer_ids:
            return False
        return [layer + 1 for layer in self.target_layer_ids] if TAPS_BY_LIST else True

    def prefill(self, input_ids: torch.Tensor, generation_config: GenerationConfig) -> torch.Tensor:
        """The library's own prefill; [rows, 1, vocab] logits of trees of the root alone, the prompts' last tokens."""
        positions = self._prepared_positions(input_ids)
        embedded = self.kwargs.get("inputs_embeds")
        prompt = max(input_ids.shape[1], 0 if embedded is None else embedded.shape[1])
        check_room(self.cache, prompt + generation_config.max_length - input_ids.shape[1] - 1)
        kwargs = {**self.kwargs, "output_hidden_states": self.output_hidden_states}
        shares = getattr(self.model.config.get_text_config(), "num_kv_shared_layers", None)
        if shares and self.target_layer_ids:
            kwargs["logits_to_keep"] = 0  # for fewer logits Gemma 4 skips all tokens but these in its last layers
        with _collecting_outputs(self.model, bool(generation_config.prefill_chunk_size)) as chunks:
            outputs = self.model._prefill(input_ids, generation_config, kwargs)
        filled = output_cache(outputs)
        if filled is None or filled is not self.cache or int(filled.get_seq_length()) == 0:
            raise RuntimeError(
                f"{type(self.model).__name__} did not fill the cache it was given; trees need one it fills."
            )
        self.taps = [torch.cat(taps, dim=1) for taps in zip(*map(self._taps_of, chunks or [outputs]), strict=True)]
        rows = outputs.logits.shape[0]
        self.rows = list(range(rows))
        last = positions[..., -1:]
        self.root_positions = last.expand(*last.shape[:-2], rows, 1)
        self.last_positions = self.root_positions + max(generation_config.max_length - input_ids.shape[1] - 1, 0)
        self.slots = int(filled.get_seq_length()) + generation_config.max_length - input_ids.shape[1]
        return outputs.logits[:, -1:]

    @contextmanager
    def growing(self) -> Iterator[None]:
        """Where trees are verified and committed: the cache has room for them, and is the library's own afterwards."""
        rows, window = len(self.rows), self.masks.window
        with growing_trees(self.cache, rows, window, self.slots) as self.trees:
            yield

    def verify(self, tree: Tree) -> torch.Tensor:
        """One forward over all nodes; logits [live rows, nodes, vocab]. One that fails leaves nothing in the cache."""
        nodes = tree.num_nodes
        tree = tree.padded(self.forwards.bucket(nodes))
        inputs = {name: self._live(value) for name, value in self.kwargs.items() if name not in HANDLED_KWARGS}
        if (types := self.kwargs.get("token_type_ids")) is not None:  # new tokens are of the last one's type
            inputs["token_type_ids"] = self._live(types)[:, -1:].expand(-1, tree.num_nodes)
        places = self.trees.ends.to(tree.tokens.device)[:, None] + tree.depths
        try:
            self.trees.plan(tree.num_nodes, whole=self.forwards.fixed)
            inputs |= {
                "input_ids": tree.tokens,
                "attention_mask": self.masks.write(self.trees, self._live(self.prompt_mask), tree.ancestors(), places),
                "position_ids": self._positions(tree),
            }
            options = {"inputs": inputs, "columns": self.trees.columns}
            logits, self.taps = self.forwards.run(self._forward, options, self.trees.anchors)
        except BaseException:
            self.trees.rollback()
            raise
        return logits[:, :nodes]

    def _forward(
        self, inputs: dict[str, Any], columns: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits [live rows, nodes, vocab] and taps; keys and values go to `columns` of the cache."""
        self.trees.write_to(columns)
        if self.has_router:
            inputs = {**inputs, "output_router_logits": False}  # its loss would read the tree mask as a padding mask
        outputs = self.forwards.compiled(self.model)(
            **inputs,
            **{self.cache_name: self.cache},
            use_cache=True,
            output_hidden_states=self.output_hidden_states,
            return_dict=True,
        )
        return outputs.logits, self._taps_of(outputs)

    def rehearse(self, tree: Tree) -> None:
        """The forward of `verify`, waited for and forgotten; what waits for its commit still does."""
        taps, uncommitted = self.taps, self.trees.uncommitted
        try:
            self.verify(tree)
            if self.model.device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(self.model.device)
        finally:
            self.taps = taps
            self.trees.rollback(uncommitted)

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """Takes the nodes but the root out of the cache if the block raises: the caller may own the cache."""
        try:
            yield
        except BaseException:
            self.trees.commit([[0]] * len(self.rows))
            raise

    def commit(self, accepted: list[Accepted]) -> Context:
        """Compacts the cache to each live row's accepted path; returns the drafter's news."""
        paths = [each.path for each in accepted]
        self.trees.commit(paths)
        roots = self.root_positions[..., self.rows, :]
        lengths = torch.tensor([len(path) for path in paths], device=roots.device)[:, None]
        self.root_positions = self.root_positions.clone()
        self.root_positions[..., self.rows, :] = roots + lengths
        roots = roots.reshape(-1, *roots.shape[-2:])[0]  # of the text, where the model has others for images
        if not self.taps:
            return Context(torch.empty(len(paths), 0, 0), roots[:, :0], [0] * len(paths))
        if self.after_prefill:
            self.after_prefill = False
            return self._prompt_context(roots)
        longest = max(map(len, paths))
        nodes = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
        positions = roots + torch.arange(longest, device=roots.device)
        return Context(self._tapped(nodes), positions, [len(path) for path in paths])

    def keep(self, rows: list[int]) -> None:
        """Goes on with those of the live rows; the others' part of the cache stays as it is."""
        self.trees.keep(rows)
        self.masks.forget()
        self.rows = [self.rows[row] for row in rows]

    def settle(self, last_tokens: torch.Tensor) -> None:
        """Puts what plain decoding caches of rows that ended before others into the cache that somebody will have.

        Args:
            last_tokens: [batch, 1] the rows' last tokens.
        """
        self.rows = list(range(len(last_tokens)))
        self.trees.keep_all()
        self.masks.forget()
        early = (self.trees.ends < self.trees.width).tolist()
        if any(early):
            self.verify(root_tree(last_tokens))
            self.trees.commit([[0] if ended else [] for ended in early])

    def _positions(self, tree: Tree) -> torch.Tensor:
        """Of the nodes. What is drafted past a row's greatest length can't be accepted, and must not reach positions
        that the model may not have.
        """
        positions = self.root_positions[..., self.rows, :] + tree.depths
        return torch.minimum(positions, self.last_positions[..., self.rows, :])

    def _live(self, value: Any) -> Any:
        """The live rows of a batch's tensor."""
        whole = len(self.trees.order)
        if len(self.rows) == whole or not isinstance(value, torch.Tensor) or value.shape[:1] != (whole,):
            return value
        return value[self.rows]

    def _prompt_context(self, roots: torch.Tensor) -> Context:
        """All tokens of the prompt that the prefill ran, padding left out; it is none of the drafter's business."""
        tokens = self.taps[0].shape[1]
        if self.prompt_mask is None:
            positions = roots + torch.arange(1 - tokens, 1, device=roots.device)
            return Context(torch.cat(self.taps, dim=-1), positions, [tokens] * len(roots))
        real = self._live(self.prompt_mask)[:, -tokens:].bool().cpu()
        lengths = real.sum(1)
        rows = (~real).byte().argsort(dim=1, stable=True)[:, : int(lengths.max())]
        positions = roots + torch.arange(rows.shape[1], device=roots.device) + 1 - lengths[:, None].to(roots.device)
        return Context(self._tapped(rows), positions, lengths.tolist())

    def _tapped(self, tokens: torch.Tensor) -> torch.Tensor:
        """[rows, n, taps * hidden] of `tokens` [rows, n], each row's own."""
        tokens = tokens.to(self.taps[0].device)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        return torch.cat([tap[rows, tokens] for tap in self.taps], dim=-1)

    def _taps_of(self, outputs: ModelOutput) -> list[torch.Tensor]:
        if self.target_layer_ids and max(self.target_layer_ids) + 1 >= len(outputs.hidden_states):
            raise ValueError(
                f"The drafter's `target_layer_ids` is {list(self.target_layer_ids)}, but {type(self.model).__name__} "
                f"returns those of layers 0..{len(outputs.hidden_states) - 2}. Use a drafter made for this target."
            )
        taps = [outputs.hidden_states[layer + 1] for layer in self.target_layer_ids]
        return [tap.to(taps[0].device) for tap in taps]  # of a target on several devices

    def _prepared_positions(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The positions that the model's forward gets, which PaliGemma, for one, makes of those that `generate` has."""
        inputs = self.model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **self.kwargs)
        if (positions := inputs.get("position_ids")) is None:
            raise ValueError(
                f"{type(self.model).__name__} is given no `position_ids` in `generate`; siblings share a position, so "
                "trees need them. Use another target."
            )
        return positions


@contextmanager
def _collecting_outputs(model: PreTrainedModel, in_chunks: bool) -> Iterator[list[ModelOutput]]:
    """The outputs of the block's forwards, if the prompt goes in chunks: the library returns the last one's only."""
    outputs: list[ModelOutput] = []
    if not in_chunks:
        yield outputs
        return
    thread = threading.get_ident()

    def collect(module: torch.nn.Module, inputs: Any, output: ModelOutput) -> None:
        if threading.get_ident() == thread:  # another thread may generate with the same model
            outputs.append(output)

    handle = model.register_forward_hook(collect)
    try:
        yield outputs
    finally:
        handle.remove()


def check_inputs(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """Raises ValueError where an argument of the forward belongs to the prompt's tokens and can't go on to nodes."""
    for name in ("cross_attention_mask", "aspect_ratio_ids"):
        if model_kwargs.get(name) is not None:
            raise ValueError(
                f"{type(model).__name__} looks at images through cross-attention (`{name}`), which trees can't follow; "
                "give it a text prompt, or use another target."
            )


def check_target(model: PreTrainedModel) -> None:
    """Refuses, before the first forward, targets whose tree forward would be wrong.

    Raises:
        ValueError: recurrent state, encoder-decoder, an attention backend that cannot take the mask, layers of
            another kind than full and sliding attention, or a forward without positions or cache.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; DDTree decoding works with decoder-only models.")
    if model._is_stateful:
        raise ValueError(
            f"{name} keeps a recurrent state, which can't go back to a branch; use an attention-only target."
        )
    text_config = model.config.get_text_config(decoder=True)
    if getattr(text_config, "recurrent_kv_cache_mode", None) == "last_loop":
        raise ValueError(
            f"{name} has `recurrent_kv_cache_mode='last_loop'`, whose keys of cached tokens are others than those of "
            "tokens in flight; set it to 'per_loop', or use another target."
        )
    strange = set(layer_types(text_config)) - {"full_attention", "sliding_attention"}
    if strange:
        raise ValueError(
            f"{name} has layers of type {sorted(strange)}; DDTree decoding can mask and roll back full and sliding "
            "attention layers only. Use another target."
        )
    attention = text_config._attn_implementation
    if attention not in SUPPORTED_ATTENTION:
        raise ValueError(
            f"`attn_implementation` is {attention!r}, which can't take a tree mask; call "
            f"`model.set_attn_implementation('sdpa')` (supported: {', '.join(SUPPORTED_ATTENTION)})."
        )
    if "position_ids" not in inspect.signature(model.forward).parameters or getattr(text_config, "alibi", False):
        raise ValueError(f"{name} takes no `position_ids`; siblings share a position, so trees need them.")
    cache_name(model)


def check_rope(model: PreTrainedModel, end: int) -> None:
    """Refuses positions at which RoPE frequencies depend on the greatest position in a forward: a tree's is ahead.

    Args:
        end: one past the last position that the call may reach.
    """
    text_config = model.config.get_text_config(decoder=True)
    rope = getattr(text_config, "rope_parameters", None) or {}
    for parameters in [rope] if "rope_type" in rope else filter(None, rope.values()):
        kind = parameters.get("rope_type", "default")
        limit = {
            "dynamic": text_config.max_position_embeddings,  # new frequencies at every length beyond
            "longrope": parameters.get("original_max_position_embeddings"),  # other frequencies beyond
        }.get(kind)
        if limit is not None and limit < end:
            raise ValueError(
                f"`max_new_tokens` or `max_length` lets positions reach {end}, and the target's {kind} RoPE changes "
                f"its frequencies beyond {limit}, which a tree would reach too early; lower it by {end - limit}."
            )
