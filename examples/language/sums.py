"""A task for trying things out: `a+b mod 10` for a language model of 75,000 parameters, on one core, without a network.

The model is a Qwen2 of two layers with random weights, the tokenizer knows 17 characters, and there are 100 prompts. A
model that is asked "3+9=" should say "2". Nothing is downloaded.
"""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = ["<pad>", "<eos>", "<unk>", "+", "=", "-", "*", *"0123456789"]
PROMPTS = [f"{a}+{b}=" for a in range(10) for b in range(10)]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character."""
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model(seed: int) -> Qwen2ForCausalLM:
    """Two layers of 64."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def ids_of(prompt: str) -> list[int]:
    """Its tokens."""
    return [WORDS.index(each) for each in prompt]


def right_token(prompt: str) -> int:
    """The token that a model should say."""
    return WORDS.index(str((int(prompt[0]) + int(prompt[2])) % 10))


@torch.no_grad()
def answers(asked: Qwen2ForCausalLM, prompts: list[str], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [P, count] that the model says to each prompt, and their log-probabilities [P, count]."""
    was_training = asked.training
    logits = asked.eval()(torch.tensor([ids_of(each) for each in prompts])).logits[:, -1]
    asked.train(was_training)
    known = torch.log_softmax(logits.float(), -1)
    said = torch.multinomial(known.exp(), count, replacement=True)
    return said, known.gather(1, said)


@torch.no_grad()
def accuracy(asked: Qwen2ForCausalLM) -> float:
    """Share of all prompts whose most likely answer is right."""
    was_training = asked.training
    said = asked.eval()(torch.tensor([ids_of(each) for each in PROMPTS])).logits[:, -1].argmax(-1)
    asked.train(was_training)
    return float((said == torch.tensor([right_token(each) for each in PROMPTS])).float().mean())
