"""Transformer models by their published configurations: their parameters, work and activations.

A model is counted as its public implementation builds it; the number of its parameters is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

VALUE_BYTES = 2
"""bf16 and fp16: weights, activations and their gradients."""


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer.

    Attributes:
        layers: transformer layers.
        hidden: width of the residual stream, h.
        heads: query heads.
        kv_heads: key and value heads; equal to ``heads`` without grouping.
        head_dim: width of a head.
        ffn: inner width of one MLP, or of one expert.
        vocab: tokens of the vocabulary.
        seq: tokens of a training sequence, s.
        experts: experts of each layer; 0 for a dense model.
        experts_per_token: experts that a token goes through.
        gated: the MLP has a gate (SwiGLU): three matrices instead of two.
        tied: embedding and head share their weight.
        gpt: GPT-2 and GPT-3: biases in all linear layers, LayerNorm, learned positions, dropout.
        qkv_bias: biases in the query, key and value projections only (Qwen2).
        qk_norm: a norm on each query and key head (Qwen3).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq: int
    experts: int = 0
    experts_per_token: int = 0
    gated: bool = True
    tied: bool = False
    gpt: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def attention_parameters(self) -> int:
        """Weights and biases of the attention of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = (queries + 2 * keys) * (self.gpt or self.qkv_bias) + self.hidden * self.gpt
        return 2 * self.hidden * (queries + keys) + biases + 2 * self.head_dim * self.qk_norm

    @property
    def mlp_parameters(self) -> int:
        """Weights and biases of one MLP or expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn + (self.ffn + self.hidden) * self.gpt

    @property
    def norm_parameters(self) -> int:
        """Of one norm: a scale, with LayerNorm also a shift."""
        return self.hidden * (2 if self.gpt else 1)

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer; of a model with experts, all experts and the router."""
        router = self.hidden * self.experts
        return (
            self.attention_parameters + self.mlp_parameters * max(1, self.experts) + router + 2 * self.norm_parameters
        )

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer; 0 for a dense model."""
        return self.mlp_parameters * self.experts

    @property
    def embedding_parameters(self) -> int:
        """Tokens, and positions where they are learned; on the first stage."""
        return (self.vocab + self.seq * self.gpt) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Last norm and output projection; on the last stage. A tied head is a copy there, but no more parameters."""
        return self.norm_parameters + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters of the model, as its authors count them."""
        shared = self.vocab * self.hidden * self.tied
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters - shared

    @property
    def active_parameters(self) -> int:
        """Parameters that one token goes through."""
        idle_experts = max(0, self.experts - self.experts_per_token) * self.mlp_parameters
        return self.parameters - self.layers * idle_experts

    @property
    def layer_forward_flops(self) -> float:
        """Floating-point operations of one sequence through one layer, forward; a backward has twice as many.

        2 for each weight and token, and 4 s^2 h for the two products of the attention (counted without the causal half,
        as MFU is defined). Source: Narayanan et al. 2021, appendix; Chowdhery et al. 2022 (PaLM), appendix B.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = 2 * self.hidden * (queries + keys) + self.hidden * self.experts
        weights += (3 if self.gated else 2) * self.hidden * self.ffn * max(1, self.experts_per_token)
        return 2.0 * self.seq * weights + 4.0 * self.seq**2 * queries

    @property
    def head_forward_flops(self) -> float:
        """Floating-point operations of one sequence through the output projection, forward."""
        return 2.0 * self.seq * self.hidden * self.vocab

    @property
    def step_flops(self) -> float:
        """Floating-point operations of one sequence, forward and backward, without any recomputation: for MFU."""
        return 3.0 * (self.layers * self.layer_forward_flops + self.head_forward_flops)

    def layer_activation_bytes(self, *, flash: bool = True) -> float:
        """Bytes that one layer keeps of one sequence for its backward, before any division over ranks.

        Counted tensor by tensor in 2-byte values: inputs of both norms and of the first projections (4 h), queries,
        keys and values, the attention's output, the MLP's inner tensors; with dropout two masks of 1 byte. Without
        flash attention also the score matrices, 5 a s^2. With experts also each token's copies for its experts, and
        what they gave before it is weighted and summed (for the router's gradient).
        For GPT (ffn = 4 h) that is s h (34 + 5 a s / h).
        Source: Korthikanti et al. 2022 (Reducing Activation Recomputation), equation 2.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inner = (3 if self.gated else 2) * self.ffn * max(1, self.experts_per_token)
        values = 4 * self.hidden + queries + 2 * keys + queries + inner + 2 * self.experts_per_token * self.hidden
        masks = 2 * self.hidden * self.gpt
        scores = 0.0 if flash else 5.0 * self.heads * self.seq**2
        return float(self.seq * (VALUE_BYTES * values + masks)) + scores

    @property
    def boundary_bytes(self) -> int:
        """Bytes of one sequence's activation at a stage boundary."""
        return VALUE_BYTES * self.seq * self.hidden


def gpt(*, layers: int, hidden: int, heads: int, vocab: int, seq: int) -> Model:
    """A model of GPT-3's kind: ffn = 4 h, biases, learned positions, tied head."""
    return Model(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=vocab,
        seq=seq,
        gated=False,
        tied=True,
        gpt=True,
    )


MODELS = {
    # Brown et al. 2020, table 2.1; GPT-2's vocabulary.
    "gpt3-175b": gpt(layers=96, hidden=12288, heads=96, vocab=50257, seq=2048),
    # config.json of the repositories of the same names on the Hugging Face hub; seq is the length of pre-training.
    "llama2-7b": Model(32, 4096, 32, 32, 128, 11008, 32000, 4096),
    "llama2-13b": Model(40, 5120, 40, 40, 128, 13824, 32000, 4096),
    "llama2-70b": Model(80, 8192, 64, 8, 128, 28672, 32000, 4096),
    "llama3-8b": Model(32, 4096, 32, 8, 128, 14336, 128256, 8192),
    "llama3-70b": Model(80, 8192, 64, 8, 128, 28672, 128256, 8192),
    "llama3-405b": Model(126, 16384, 128, 8, 128, 53248, 128256, 8192),
    "mixtral-8x7b": Model(32, 4096, 32, 8, 128, 14336, 32000, 8192, experts=8, experts_per_token=2),
    "mixtral-8x22b": Model(56, 6144, 48, 8, 128, 16384, 32768, 8192, experts=8, experts_per_token=2),
    "qwen2.5-7b": Model(28, 3584, 28, 4, 128, 18944, 152064, 4096, qkv_bias=True),
    "qwen2.5-32b": Model(64, 5120, 40, 8, 128, 27648, 152064, 4096, qkv_bias=True),
    "qwen2.5-72b": Model(80, 8192, 64, 8, 128, 29568, 152064, 4096, qkv_bias=True),
    "qwen3-8b": Model(36, 4096, 32, 8, 128, 12288, 151936, 4096, qk_norm=True),
    "qwen3-32b": Model(64, 5120, 64, 8, 128, 25600, 151936, 4096, qk_norm=True),
    "qwen3-30b-a3b": Model(48, 2048, 32, 4, 128, 768, 151936, 4096, experts=128, experts_per_token=8, qk_norm=True),
    "qwen3-235b-a22b": Model(94, 4096, 64, 4, 128, 1536, 151936, 4096, experts=128, experts_per_token=8, qk_norm=True),
}
