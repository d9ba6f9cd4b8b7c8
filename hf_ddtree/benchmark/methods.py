"""Who takes part in `hf-ddtree bench race`: plain decoding, transformers' own methods, ours, other implementations."""

import argparse
import copy
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel

from ..configuration import DDTreeConfig
from ..models import DFlashDraftModel
from .race import PLAIN

COMPILED = "plain, static cache, compiled"
AUTO = "DDTree, auto"
LOOKUP_BUDGET = 16

# Given a prompt as `encode` makes it and whether to wait for the device at each stage, the text's ids [1, length] or an
# output that has them as `sequences`.
Generate = Callable[[dict[str, torch.Tensor], bool], Any]


@dataclass(frozen=True)
class Contestant:
    """One way to generate greedily.

    Attributes:
        name: in tables.
        generate: see `Generate`.
        ours: in float32 its text must be plain decoding's.
        budget: tree nodes, of a DDTree whose budget is given.
        drafter: the model that drafts, if one does.
        hooked: whether hooks on the target's forward leave it as it is, which a compiled one's do not.
    """

    name: str
    generate: Generate
    ours: bool = False
    budget: int | None = None
    drafter: PreTrainedModel | None = None
    hooked: bool = True


def contestants(
    target: PreTrainedModel,
    drafter: PreTrainedModel | None,
    assistant: PreTrainedModel | None,
    options: argparse.Namespace,
) -> tuple[list[Contestant], dict[str, str]]:
    """All that `options` ask for, plain decoding first; and by name why others are left out.

    Args:
        drafter: of the trees; None = lookup.
        assistant: for transformers' assisted decoding; None leaves that out.
        options: `max_new_tokens`, `budgets`, `methods`, `compiled`, `compile`, `lookup`, `reference`,
            `reference_module`.

    Raises:
        ValueError: `methods` names none, or the reference can't be had.
    """
    trees, skipped = _trees(target, drafter, options)
    everyone = [*_rivals(target, drafter, assistant, options), *trees]
    if options.reference is not None:
        everyone.append(_reference(target, drafter, options))
    if options.methods is None:
        return everyone, skipped
    chosen = [each for each in everyone if any(part in each.name for part in options.methods)]
    skipped = {name: why for name, why in skipped.items() if any(part in name for part in options.methods)}
    if not chosen and not skipped:
        names = ", ".join(f'"{each.name}"' for each in everyone)
        raise ValueError(f"`--methods {' '.join(options.methods)}` is part of no method's name; there are {names}.")
    return [everyone[0], *(each for each in chosen if each.name != PLAIN)], skipped


def _rivals(
    target: PreTrainedModel,
    drafter: PreTrainedModel | None,
    assistant: PreTrainedModel | None,
    options: argparse.Namespace,
) -> list[Contestant]:
    """Plain decoding and transformers' own methods."""
    common = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    found = [Contestant(PLAIN, by_generate(target, GenerationConfig(**common)))]
    if options.compiled:
        config = GenerationConfig(cache_implementation="static", compile_config=_compile_config(), **common)
        found.append(Contestant(COMPILED, by_generate(target, config), hooked=False))
    if isinstance(drafter, DFlashDraftModel):
        config = GenerationConfig(speculation_type="dflash", **common)
        generate = by_generate(target, config, assistant_model=drafter)
        found.append(Contestant("transformers' DFlash chain", generate, drafter=drafter))
    if assistant is not None:
        generate = by_generate(target, GenerationConfig(**common), assistant_model=assistant)
        found.append(Contestant("transformers' assisted decoding", generate, drafter=assistant))
    config = GenerationConfig(prompt_lookup_num_tokens=10, **common)
    found.append(Contestant("transformers' prompt lookup", by_generate(target, config)))
    return found


def _compile_config() -> CompileConfig:
    config = CompileConfig(fullgraph=False)
    config._compile_all_devices = True  # else `generate` compiles on accelerators only
    return config


def _trees(
    target: PreTrainedModel, drafter: PreTrainedModel | None, options: argparse.Namespace
) -> tuple[list[Contestant], dict[str, str]]:
    """Our methods, and by name why others are left out."""
    common: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    common["return_dict_in_generate"] = True
    if options.compile is not None:
        common["compile"] = options.compile
    drafted: dict[str, Any] = {"drafter": "lookup"} if drafter is None else {}
    fields: dict[str, dict[str, Any]] = {}
    if isinstance(drafter, DFlashDraftModel):
        fields["DDTree code, chain"] = {"tree_budget": drafter.config.block_size - 1, "tree_top_k": 1}
    fields |= {f"DDTree, budget {budget}": {"tree_budget": budget, **drafted} for budget in options.budgets}
    fields[AUTO] = {"tree_budget": "auto", **drafted}
    if options.lookup and drafter is not None:
        fields["DDTree, lookup"] = {"tree_budget": LOOKUP_BUDGET, "drafter": "lookup"}
    found, skipped = [], {}
    for name, own in fields.items():
        try:
            config = DDTreeConfig(**own, **common)
        except ValueError as error:
            if name != AUTO:
                raise
            skipped[name] = f"not in this version: {error}"
            continue
        model = None if "drafter" in own else drafter
        generate = by_generate(target, config, **({} if model is None else {"assistant_model": model}))
        budget = own["tree_budget"] if name.startswith("DDTree, budget") else None
        found.append(Contestant(name, generate, ours=True, budget=budget, drafter=model))
    return found, skipped


def by_generate(target: PreTrainedModel, config: GenerationConfig, **arguments: Any) -> Generate:
    """A method of `target.generate`."""
    synchronized = copy.deepcopy(config)
    if isinstance(synchronized, DDTreeConfig):
        synchronized.synchronize_stages = True

    def generate(prompt: dict[str, torch.Tensor], synchronize: bool) -> Any:
        chosen = synchronized if synchronize else config
        return target.generate(**prompt, generation_config=chosen, **arguments)

    return generate


def _reference(target: PreTrainedModel, drafter: PreTrainedModel | None, options: argparse.Namespace) -> Contestant:
    """Another implementation: a module with `generate(target, drafter, input_ids, max_new_tokens=...)`.

    Raises:
        ValueError: there is no such module or function.
    """
    module, folder = options.reference_module, Path(options.reference).resolve()
    if not folder.is_dir():
        raise ValueError(f"`--reference {options.reference}` is no folder; give the checkout's.")
    sys.path.insert(0, str(folder))
    try:
        function = importlib.import_module(module).generate
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"`--reference {options.reference}` has no `{module}.generate(target, drafter, input_ids, "
            f"max_new_tokens=...)` ({error}); name the module with `--reference-module`."
        ) from error
    finally:
        sys.path.remove(str(folder))

    def generate(prompt: dict[str, torch.Tensor], synchronize: bool) -> Any:
        return function(target, drafter, prompt["input_ids"], max_new_tokens=options.max_new_tokens)

    return Contestant(f"reference {folder.name}", generate, drafter=drafter)
