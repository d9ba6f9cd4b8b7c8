"""The shortest use: a target, its drafter, one config. Runs on a laptop CPU."""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ddtree import DDTreeConfig, DFlashDraftModel
from hf_ddtree.models.smollm2 import smollm2_path

target = AutoModelForCausalLM.from_pretrained(smollm2_path())
tokenizer = AutoTokenizer.from_pretrained(smollm2_path())
drafter = DFlashDraftModel.from_pretrained(
    Path(__file__).parent.parent / "model_cards/smollm2-135m-instruct-dflash", dtype=target.dtype
)

chat = [{"role": "user", "content": "Why is the sky blue?"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
ddtree = DDTreeConfig(tree_budget=32, max_new_tokens=128, do_sample=False, return_dict_in_generate=True)
result = target.generate(**inputs, assistant_model=drafter, generation_config=ddtree)

print(tokenizer.decode(result.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"\n{result.mean_acceptance_length:.2f} tokens per round, {result.rounds} forwards of the target")
