"""What a checkpoint is made of, what a draft on it costs, and what that can gain."""

import pytest
import torch
from transformers import FalconConfig, LlamaConfig, Qwen2Config, Qwen3Config

from layerskip.errors import CheckpointError, UnsupportedModelError
from layerskip.models.decoder import Decoder
from layerskip.models.inspection import inspect_checkpoint, inspect_model
from layerskip.plan import DraftPlan
from layerskip.speedup import best_draft_length, speedup, tokens_per_round
from tests.tiny_models import NUM_LAYERS, tiny_model


def test_parameters_are_counted_once_each(family_model):
    inspection = inspect_model(family_model)
    assert inspection.parameters == sum(parameter.numel() for parameter in family_model.parameters())
    assert inspection.tied == family_model.config.tie_word_embeddings
    assert len(inspection.attention_parameters) == len(inspection.mlp_parameters) == NUM_LAYERS


def test_cache_bytes_are_those_of_the_cache(family_model):
    assert inspect_model(family_model).kv_bytes_per_token == Decoder(family_model).new_cache(1, 1).nbytes


def test_a_checkpoint_says_the_same_as_its_model(family_model, tmp_path):
    family_model.config.save_pretrained(tmp_path)  # no weights
    assert inspect_checkpoint(tmp_path) == inspect_model(family_model)


def test_dtype_is_the_one_asked_for(llama, tmp_path):
    llama.config.save_pretrained(tmp_path)
    double, half = inspect_checkpoint(tmp_path), inspect_checkpoint(tmp_path, dtype="bf16")
    assert (double.dtype, half.dtype) == ("float64", "bfloat16")
    assert double.kv_bytes_per_token == 4 * half.kv_bytes_per_token


def test_windows_are_those_of_the_layers():
    assert inspect_model(tiny_model("qwen2-window")).windows == (None, None, 6, 6)


def test_unknown_architecture_and_missing_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["GPTJForCausalLM"], "model_type": "gptj"}')
    with pytest.raises(UnsupportedModelError, match="GPTJForCausalLM.*supported are"):
        inspect_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect_checkpoint(tmp_path / "nowhere")


def test_what_would_be_wrong_is_refused_by_its_config(tmp_path):
    FalconConfig(alibi=True, architectures=["FalconForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="FalconForCausalLM.*ALiBi"):
        inspect_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM.*cannot be rolled back"):
        inspect_checkpoint(tmp_path)


def test_a_step_reads_the_chosen_experts_only():
    """Two of four in three layers; the second layer has an ordinary MLP."""
    inspection, layers = inspect_model(tiny_model("qwen3-moe")), tiny_model("qwen3-moe").model.layers
    unread = [(everything - read) for everything, read in
              zip(inspection.mlp_parameters, inspection.mlp_step_parameters, strict=True)]  # fmt: skip
    of_experts = sum(each.numel() for each in layers[0].mlp.experts.parameters())
    assert unread == [of_experts // 2, 0, of_experts // 2, of_experts // 2]
    assert inspection.step_parameters < inspection.parameters - inspection.embedding_parameters
    assert inspection.draft_cost(Decoder(tiny_model("qwen3-moe")).full_path) == 1


def test_positions_are_told_as_they_are():
    gpt2, gemma3, smollm3 = (inspect_model(tiny_model(name)) for name in ("gpt2", "gemma3", "smollm3"))
    assert (gpt2.rope, gpt2.rotated, gpt2.position_parameters) == ({}, (False,) * 4, 160 * 32)
    assert set(gemma3.rope) == {"full_attention", "sliding_attention"} and gemma3.windows == (6, None) * 2
    assert smollm3.rotated == (True, False) * 2


def test_a_norm_that_both_sub_blocks_read_is_attentions():
    layer, inspection = tiny_model("falcon").transformer.h[0], inspect_model(tiny_model("falcon"))
    assert inspection.mlp_parameters[0] == sum(each.numel() for each in layer.mlp.parameters())


def shape(vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: object) -> dict:
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more,
    }  # fmt: skip


PUBLISHED = {
    "Llama-2-7B": (LlamaConfig(**shape(32_000, 4096, 11_008, 32, 32, 32)), 0.65),
    "Llama-3-8B": (LlamaConfig(**shape(128_256, 4096, 14_336, 32, 32, 8)), 2.41),
    "Qwen3-8B": (Qwen3Config(**shape(151_936, 4096, 12_288, 36, 32, 8, head_dim=128)), 3.23),
    "Llama-3.2-1B": (LlamaConfig(**shape(128_256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True)), 4.32),
    "Qwen2.5-0.5B": (Qwen2Config(**shape(151_936, 896, 4864, 24, 14, 2, tie_word_embeddings=True)), 9.13),
    "SmolLM2-135M": (LlamaConfig(**shape(49_152, 576, 1536, 30, 9, 3, tie_word_embeddings=True)), 8.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_head_in_blocks_of_known_models(name, tmp_path):
    config, head_blocks = PUBLISHED[name]
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(tmp_path)
    inspection = inspect_checkpoint(tmp_path)
    assert inspection.head_blocks == pytest.approx(head_blocks, abs=0.005)
    layers = inspection.num_layers
    cost = inspection.draft_cost(DraftPlan.exit(4).path(layers))
    assert cost == pytest.approx((4 + head_blocks) / (layers + head_blocks), rel=1e-3)
    if name == "Llama-3-8B":
        assert cost == pytest.approx(0.186, abs=5e-4)


def test_cost_counts_sub_blocks_apart(llama):
    inspection = inspect_model(llama)
    attention, mlp = inspection.attention_parameters[1], inspection.mlp_parameters[2]
    plan = DraftPlan.skip(attention=[1], mlp=[2])
    saved = 1 - inspection.draft_cost(plan.path(NUM_LAYERS))
    assert saved == pytest.approx((attention + mlp) / inspection.step_parameters)
    assert inspection.draft_cost(Decoder(llama).full_path) == 1


@pytest.mark.parametrize(
    ("cost", "verify_cost", "acceptance", "gain"),
    [(0.4, 1, 0.6, 1.14), (0.4, 1, 0.9, 1.58), (0.5, 1, 0.98, 1.66), (0.5, 1.15, 0.95, 1.45), (0.6, 1.15, 0.6, 0.91)],
)
def test_best_gain_of_known_cases(cost, verify_cost, acceptance, gain):
    """A table of the literature's formula; below 1 it gives the best of the draft lengths from 1 on."""
    best = max(speedup(acceptance, drafts, cost, verify_cost) for drafts in range(1, 17))
    assert best == pytest.approx(gain, abs=0.005)
    assert best_draft_length(acceptance, cost, verify_cost)[1] == max(1, best)


def test_tokens_per_round_is_the_geometric_series():
    for acceptance in (0.0, 0.3, 0.9, 1.0):
        for drafts in (0, 1, 5):
            series = sum(acceptance**each for each in range(drafts + 1))
            assert tokens_per_round(acceptance, drafts) == pytest.approx(series)
    assert tokens_per_round(0.8, 3) == pytest.approx((1 - 0.8**4) / (1 - 0.8))


def test_drafting_gains_exactly_when_acceptance_exceeds_cost():
    for percent in range(1, 100):
        for cost in (0.2, 0.5, 0.955):
            drafts, gain = best_draft_length(percent / 100, cost)
            assert (drafts > 0, gain > 1) == (percent / 100 > cost,) * 2


def test_inspection_needs_no_memory_for_weights(tmp_path):
    """A model of 70 billion parameters is described at once."""
    config = LlamaConfig(**shape(128_256, 8192, 28_672, 80, 64, 8), architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    assert inspect_checkpoint(tmp_path, dtype=torch.bfloat16).parameters == pytest.approx(70.55e9, rel=1e-3)
