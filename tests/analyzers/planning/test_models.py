"""Parameters of the presets, against the counts that are published for their checkpoints."""

from __future__ import annotations

import pytest

from ppdiag.analyzers.planning.models import MODELS, gpt

# "safetensors": {"total": ...} of each repository on the Hugging Face hub; GPT-3 was never published: by its
# configuration (Brown et al. 2020, table 2.1), which the paper rounds to 175.0 billion.
PUBLISHED = {
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_parameters_of_a_preset_are_those_of_its_checkpoint(name):
    assert MODELS[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions"), [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.2), ("qwen3-30b-a3b", 3.4)]
)
def test_a_token_meets_only_its_experts(name, billions):
    assert round(MODELS[name].active_parameters / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "billions"),
    # Narayanan et al. 2021, table 1; vocabulary 51200, sequences of 2048
    [
        (80, 12288, 96, 145.6),
        (96, 16384, 128, 310.1),
        (105, 20480, 128, 529.6),
        (128, 25600, 160, 1008.0),
    ],
)
def test_models_of_gpt_kind_have_the_parameters_of_megatrons_table(layers, hidden, heads, billions):
    model = gpt(layers=layers, hidden=hidden, heads=heads, vocab=51200, seq=2048)
    assert round(model.parameters / 1e9, 1) == billions


def test_a_gpt_layer_keeps_34_bytes_for_each_value_and_the_scores():
    # Korthikanti et al. 2022, equation 1: s b h (34 + 5 a s / h)
    model = MODELS["gpt3-175b"]
    assert model.layer_activation_bytes() == 34 * model.seq * model.hidden
    scores = 5 * model.heads * model.seq / model.hidden
    assert model.layer_activation_bytes(flash=False) == pytest.approx((34 + scores) * model.seq * model.hidden)


def test_the_work_of_a_gpt_step_is_72_b_s_l_h2_and_the_rest():
    # Narayanan et al. 2021, equation 3 without recomputation: 72 B s l h^2 (1 + s/6h + V/12lh)
    model = gpt(layers=80, hidden=12288, heads=96, vocab=51200, seq=2048)
    s, l, h, v = 2048, 80, 12288, 51200  # noqa: E741  (the paper's names)
    assert model.step_flops == pytest.approx(72 * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h)))
