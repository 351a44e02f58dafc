"""Small task for experiments: `a+b mod 10` for a language model of 75,000 parameters, on one core, without a network.

The model is a Qwen2 of two layers with random weights, the tokenizer knows 17 characters, and the task has 100 prompts.
The right answer to "3+9=" is "2". Nothing is downloaded.
"""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = ["<pad>", "<eos>", "<unk>", "+", "=", "-", "*", *"0123456789"]
PROMPTS = [f"{a}+{b}=" for a in range(10) for b in range(10)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each character."""
    tokens = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model(seed: int) -> Qwen2ForCausalLM:
    """Return a new model with two layers of 64 units and weights from the seed."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def ids_of(prompt: str) -> list[int]:
    """Return the tokens of a prompt."""
    return [WORDS.index(each) for each in prompt]


def right_token(prompt: str) -> int:
    """Return the token that is the right answer to a prompt."""
    return WORDS.index(str((int(prompt[0]) + int(prompt[2])) % 10))


@torch.no_grad()
def answers(model: Qwen2ForCausalLM, prompts: list[str], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `count` answers to each prompt, as tokens [P, count], and their log-probabilities [P, count]."""
    was_training = model.training
    logits = model.eval()(torch.tensor([ids_of(each) for each in prompts])).logits[:, -1]
    model.train(was_training)
    logprobs = torch.log_softmax(logits.float(), -1)
    tokens = torch.multinomial(logprobs.exp(), count, replacement=True)
    return tokens, logprobs.gather(1, tokens)


@torch.no_grad()
def accuracy(model: Qwen2ForCausalLM) -> float:
    """Return the share of all prompts whose most likely answer is right."""
    was_training = model.training
    tokens = model.eval()(torch.tensor([ids_of(each) for each in PROMPTS])).logits[:, -1].argmax(-1)
    model.train(was_training)
    return float((tokens == torch.tensor([right_token(each) for each in PROMPTS])).float().mean())
