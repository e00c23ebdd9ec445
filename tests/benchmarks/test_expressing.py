"""What odd rows mean: cells, names, machines, and the changes of a model that no plan has a word for. By hand.

Tests of `models/dimensions.py`.
"""

from __future__ import annotations

import pytest
from test_published import row

from benchmarks.published_dialects import FLASH2_ON_HOPPER, dialect_of
from benchmarks.published_frameworks import framework_of
from benchmarks.published_machines import EFA, cluster, machine
from benchmarks.published_models import decoder, model, profile, variant
from benchmarks.published_names import known_by_name
from benchmarks.published_numerics import NF4_TWICE_BITS, Numerics, numerics_of
from benchmarks.published_plans import Case, Guess, case_of, explained, guess_on, recomputed
from benchmarks.published_rows import Row, Unscored, measured, parsed
from benchmarks.published_scores import score_row
from benchmarks.published_variants import Variant, pieces_of
from meshwright.core.profile import Op, Poly, Profile
from meshwright.core.work import Compute, Work
from meshwright.machine.named_clusters import preset
from meshwright.models.dimensions import ResNetConfig, VGGConfig, ViTConfig
from meshwright.simulator.pricing import price

D, F, HEADS, LAYERS, V, S = 256, 512, 8, 4, 1024, 128
"""Of `row()`."""


def op(found: Profile, name: str, layer: str = "blocks") -> Op:
    return next(op for each in found.layers if each.name == layer for op in each.ops if op.name == name)


def profile_of(**changes: str) -> Profile:
    made = explained(row(**changes))
    config = model(made)
    return profile(config, variant(made, config))


@pytest.mark.parametrize(
    ("text", "column", "number"),
    [
        ("61.5", "seq_len", 61.5),
        ("~2,048", "seq_len", 2048),
        ("2k", "seq_len", 2048),
        ("64K", "micro_batch", 65536),
        ("128k", "vocab", 128_000),
        ("1.3B", "params", 1.3e9),
        ("355M", "params", 355e6),
        ("7e9", "params", 7e9),
        ("1,024,000", "global_batch", 1_024_000),
        ("8 (per GPU)", "micro_batch", 8),
        ("4M tokens", "global_batch", 4 * 2**20),
        ("a few", "micro_batch", None),
    ],
)
def test_numbers(text: str, column: str, number: float | None) -> None:
    assert parsed(text, column) == (None if number is None else pytest.approx(number))


@pytest.mark.parametrize("text", ["126 and 256", "256 , 126", "256/126", "126, 256", "256,126 "])
def test_of_two_batches_the_smaller_is_that_of_full_precision(text: str) -> None:
    if text == "256,126 ":  # three digits after a comma are thousands
        assert row(micro_batch=text).whole("micro_batch") == 256_126
        return
    assert row(micro_batch=text, precision="tf32").whole("micro_batch") == 126
    assert row(micro_batch=text, precision="mixed (fp16/amp)").whole("micro_batch") == 256
    assert row(grad_accum=text, precision="mixed (fp16/amp)").whole("grad_accum") == 126


def test_a_batch_told_in_tokens() -> None:
    assert row(global_batch="64k tokens", seq_len="2048").batch == 32


def test_an_average_length_is_rounded() -> None:
    assert row(seq_len="469.8").whole("seq_len") == 470


# Published counts of parameters, to the digits that are published.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-2-7B (Pax)", 6.738),
        ("LLAMA3_8B", 8.030),
        ("LLAMA3.1_405B", 405.9),
        ("Mixtral 8x7B", 46.70),
        ("Qwen2.5-7B", 7.616),
        ("Qwen3_30B_a3B (tokendrop)", 30.53),
        ("gemma-2-9b", 9.241),
        ("falcon-40b", 41.30),
        ("phi-2", 2.780),
        ("GPT OSS 120B", 116.8),
        ("DeepSeekV3 (dropless)", 671.0),
        ("Kimi-K2", 1026),
        ("Moonlight-16B-A3B", 15.96),
        ("bert_large_squad", 0.334),
    ],
)
def test_models_known_by_name_have_as_many_parameters(name: str, billions: float) -> None:
    silent = known_by_name(Row({"model": name, "seq_len": "2048"}))
    config = decoder(silent)
    form = variant(silent, config)
    assert profile(config, form).num_params / 1e9 == pytest.approx(billions, rel=0.012)


def test_a_name_gives_what_is_missing_and_nothing_to_another_model() -> None:
    told = {"model": "Llama-3-8B", "hidden": "", "layers": "", "heads": "", "vocab": "", "ffn": "", "family": ""}
    assert decoder(known_by_name(row(**told))).vocab_size == 128256
    assert decoder(known_by_name(row(**{**told, "vocab": "32000"}))).vocab_size == 32000
    shallow = known_by_name(row(**{**told, "layers": "4"}))
    assert shallow.text("hidden") == ""


def test_experts_are_as_wide_as_the_parameters_say() -> None:
    # Attention 4 d^2 = 262144, norms 2 d, router 8 d; an expert of width w has 3 d w. Embedding, head, last norm.
    layer = 4 * 256**2 + 2 * 256 + 8 * 256 + 8 * 3 * 256 * 192
    told = 4 * layer + 2 * 1024 * 256 + 256
    found = decoder(row(experts="8", topk="2", params=str(told)))
    assert (found.num_experts, found.experts_per_token, found.expert_ffn_size) == (8, 2, 192)


def test_image_models() -> None:
    silent = dict.fromkeys(("layers", "hidden", "heads", "seq_len"), "")
    found = {
        name: model(row(model=name, notes="img 256; largest that fit", **silent))
        for name in ("tv_resnet101", "vgg19", "vit_small_patch32_224", "ViT-L/16", "ViT-G/14")
        if name != "ViT-G/14"
    }
    assert found["tv_resnet101"] == ResNetConfig(stages=(3, 4, 23, 3), image_size=256)
    assert found["vgg19"] == VGGConfig(stages=(2, 2, 4, 4, 4), image_size=256)
    small = found["vit_small_patch32_224"]
    assert isinstance(small, ViTConfig)
    assert (small.hidden_size, small.num_tokens) == (384, 7 * 7 + 1)
    giant = model(row(model="ViT-G/14", **silent))
    assert profile(giant).num_params == pytest.approx(1.85e9, rel=0.01)  # Zhai et al. 2022: 1843 M
    for name in ("ecaresnet50t", "seresnet50", "vgg16_bn", "resnet50d", "vit_base_resnet50_384"):
        with pytest.raises(Unscored):
            model(row(model=name, family="vision", **silent))


def test_machines_of_racks_and_links() -> None:
    rack = machine(row(hardware="GB200", gpus="128", gpus_per_node=""))
    assert (rack.devices_per_node, rack.num_nodes) == (64, 2)  # of the 72 that NVLink joins
    assert machine(row(hardware="GB300", gpus="16", gpus_per_node="4")).devices_per_node == 16
    told = machine(row(hardware="B200", gpus="64", gpus_per_node="8", interconnect="NVLink domain 32"))
    assert (told.devices_per_node, told.num_nodes) == (32, 2)
    rates = {
        "3.2 Tbps EFA per node": 3.2e12 / 8 / 8,
        "8x400Gb NDR": 400e9 / 8,
        "4 x 200 Gb/s per node": 100e9 / 8,
        "Jean Zay: NVLink3 in node, 4x OmniPath 100Gb/s per node": 50e9 / 8,
        "400 Gb/s InfiniBand per GPU": 50e9,
        "NVLink4": None,
    }
    found = {text: machine(row(gpus="16", interconnect=text)).outer_bytes_per_second for text in rates}
    assert found == {text: rate and pytest.approx(rate) for text, rate in rates.items()}


def test_a_card_of_another_make_and_a_link_by_its_name() -> None:
    usual = preset("h100").device
    text = "H100 96GB HBM2e (2.4TB/s, 500W Grand Teton)"
    found = cluster(machine(row(hardware=text, gpu_mem_gb="96"))).device
    assert (found.memory_bytes_per_second, found.memory_bytes, found.power_watts) == (2.4e12, 96_000_000_000, 500)
    assert found.matmul_fraction == pytest.approx(usual.matmul_fraction * (5 / 7) ** 0.5)
    assert cluster(machine(row(hardware="H100-SXM-80GB", gpu_mem_gb="80"))).device == usual
    far = {"gpus": "16", "interconnect": "NVLink4 in node; AWS EFA between nodes"}
    assert cluster(machine(row(hardware="H100-SXM-80GB", **far))).outer == EFA
    assert cluster(machine(row(hardware="A100-SXM4-80GB", **far))).outer == preset("a100-80").outer


def test_attention_by_the_kernels_generation() -> None:
    def share(hardware: str, **cells: str) -> float:
        return dialect_of(row(hardware=hardware, **cells)).attention.share

    assert share("A100-SXM4-80GB", attention_kernel="flash-attn-2") == 1
    assert share("H100", attention_kernel="flash-attn-2") == share("H100") == FLASH2_ON_HOPPER
    assert share("H100", attention_kernel="flash-attn-3") == share("H100", framework="Megatron-Bridge") == 1
    assert share("A100-SXM4-80GB", attention_kernel="flash_attention v1.0.8") < 1
    assert dialect_of(row(framework="NVIDIA DeepLearningExamples")).attention.passes > 0


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_scores_that_leave_the_chip_are_all_pairs_of_tokens(family: str) -> None:
    case = case_of(row(family=family, framework="NVIDIA DeepLearningExamples"))
    work = case.dialect.change(price(profile(case.config, case.variant), case.plans[0], sequence=S))
    passed = [task for task in work.computes if task.name == "attention.core" and task.kind == "memory"]
    scores = case.plans[0].microbatch * HEADS * S * S * 2
    assert passed[0].moved_bytes == pytest.approx(case.dialect.attention.passes * scores)


def test_ranks_that_have_the_same_send_a_part_each() -> None:
    made = {"tp": "4", "pp": "2", "dp": "1", "hidden": "512", "framework": "Megatron-LM"}
    sent = {}
    for sequence in ("0", "1"):
        case = case_of(row(sp=sequence, **made))
        plain = price(profile(case.config), case.plans[0], sequence=S)
        changed = case.dialect.change(plain)
        sends = [sum(float(t.bytes) for t in work.collectives if t.kind == "send") for work in (plain, changed)]
        gathers = [sum(t.kind == "all_gather" for t in work.collectives) for work in (plain, changed)]
        sent[sequence] = sends[1] / sends[0], gathers[1] - gathers[0]
    assert sent == {"0": (0.25, 2), "1": (1.0, 0)}  # where the sequence is split each has its own part already


def test_gradients_are_summed_in_the_bits_of_the_framework() -> None:
    def is_narrow(**cells: str) -> bool:
        return dialect_of(row(**cells)).narrow_sums

    assert is_narrow(framework="Megatron-LM", precision="fp16 mixed")
    assert not is_narrow(framework="Megatron-LM", precision="bf16")
    assert is_narrow(framework="Megatron-Bridge", precision="bf16", provenance="NVIDIA-NeMo/Megatron-Bridge")
    assert not is_narrow(framework="Megatron-Core", precision="bf16")
    assert is_narrow(framework="llm-foundry", notes="MP mode PURE")
    assert not is_narrow(framework="llm-foundry")
    assert is_narrow(url="https://arxiv.org/abs/2302.13971")
    case = case_of(row(dp="8", gpus="8", global_batch="8", framework="fairscale"))
    plain = price(profile(case.config), case.plans[0], sequence=S)
    sums = [
        sum(float(task.bytes) for task in work.collectives if task.kind == "reduce_scatter" and task.origin == "shard")
        for work in (price(profile(case.config), case.plans[0], sequence=S), case.dialect.change(plain))
    ]
    assert sums[1] == sums[0] / 2


def test_a_token_travels_once_to_each_node() -> None:
    experts = {"ep": "64", "topk": "8", "gpus": "64", "dp": "64", "global_batch": "64", "hardware": "H800-SXM-80GB"}
    theirs = dialect_of(row(**experts, framework="HAI-LLM"))
    assert theirs.hides_dispatch
    # At most four of eight nodes, one of two trips in 8 bits.
    assert theirs.dispatch_share == pytest.approx(0.75 * 4 / 8)
    recipe = {"framework": "Megatron-Bridge", "provenance": "Megatron-Bridge", "model": "DeepSeek V3"}
    assert dialect_of(row(**{**experts, **recipe})).dispatch_share == pytest.approx(1 - (7 / 8) ** 8)
    assert dialect_of(row(**{**experts, "ep": "8"}, framework="HAI-LLM")).dispatch_share == 0.75
    assert dialect_of(row(**experts)).dispatch_share == 1
    assert dialect_of(row(tp="2", framework="Megatron-Core")).dispatch_share == 0.5
    qwen = {**recipe, "hardware": "DGX-H100", "model": "Qwen3_30B_a3B"}
    assert dialect_of(row(**qwen)).hides_dispatch
    assert not dialect_of(row(**{**qwen, "hardware": "DGX-B200"})).hides_dispatch


def test_a_part_of_what_layers_say_hides_behind_their_matmuls() -> None:
    case = case_of(row(tp="4", dp="2", sp="1", framework="nanotron"))
    plain = price(profile(case.config), case.plans[0], sequence=S)
    inside = [task for task in case.dialect.change(plain).collectives if task.origin == "tensor" and not task.per_step]
    repeats = {hidden: sum(float(task.repeat) for task in inside if task.hidden is hidden) for hidden in (True, False)}
    share = case.dialect.hidden_tensor
    assert 0 < share < 1
    assert repeats[True] / (repeats[True] + repeats[False]) == pytest.approx(share)


def test_recipes_tell_what_is_computed_again() -> None:
    silent = {"recompute": "per recipe (see scripts/performance)", "framework": "Megatron-Bridge"}
    assert recomputed(explained(row(model="GPT OSS 120B", hardware="DGX-B200", **silent))) == ("layernorm", "act")
    assert recomputed(explained(row(model="GPT OSS 120B", hardware="DGX-GB300", **silent))) == ()


def test_stages_that_share_the_vocabulary_are_not_expressed() -> None:
    with pytest.raises(Unscored, match="schedule is"):
        case_of(row(pp="4", dp="2", schedule="1F1B / vocab-1"))


def test_recipes_that_do_not_tell_recompute_no_blocks_and_prove_no_memory() -> None:
    silent = {"recompute": "per recipe (see scripts/performance)"}
    recipe, other = (case_of(row(framework=name, **silent)) for name in ("Megatron-Bridge", ""))
    assert len(recipe.plans) == 1
    assert len(other.plans) == 2
    assert not recipe.is_told


def test_sharded_parameters_of_before_came_by_one_card() -> None:
    case = case_of(row(gpus="64", dp="64", global_batch="64", zero_stage="3", framework="DeepSpeed"))
    found = case.dialect.cluster(cluster(case.machine))
    assert found.outer.bytes_per_second * found.devices_per_node == pytest.approx(case.dialect.gathers_by_node)


def test_a_device_without_bf16_computes_in_fp16() -> None:
    rates = cluster(machine(row(hardware="V100 32GB"))).device.flops_per_second
    assert rates["bf16"] == rates["fp16"] == preset("v100").device.flops_per_second["fp16"]
    assert case_of(row(hardware="V100 32GB", precision="fp16")).is_told


def test_encoders_look_both_ways() -> None:
    one_way, both = profile_of(family="gpt", vocab="1024"), profile_of(family="bert")
    assert op(one_way, "attention.core").flops == Poly(bss=2 * D)
    assert op(both, "attention.core").flops == Poly(bss=4 * D)
    assert op(both, "attention.core").backward_flops == Poly(bss=10 * D)
    spans = profile_of(family="bert", task="SQuAD")
    assert op(spans, "output", "head").flops == Poly(bs=2 * 2 * D)
    assert op(spans, "cross_entropy", "head").saved.bs == pytest.approx(2, abs=0.01)


def test_lora_trains_two_thin_matrices_and_keeps_nothing_for_the_others() -> None:
    full, lora = profile_of(), profile_of(task="finetune-lora")
    trained = [p for layer in lora.layers for p in layer.params if not p.frozen for _ in range(layer.repeat)]
    # Query and value of rank 8 in four layers: 8 x 256 and 256 x 8 each.
    assert sum(p.shape[0] * p.shape[1] for p in trained) == LAYERS * 2 * 2 * 8 * D
    assert op(full, "mlp.up").backward_flops == Poly(bs=4 * D * F)
    assert op(lora, "mlp.up").backward_flops == Poly(bs=2 * D * F)
    kept = {name: op(lora, name).saved.bs for name in ("attention.input", "mlp.input", "mlp.swiglu")}
    assert kept == pytest.approx({"attention.input": D, "mlp.input": 0, "mlp.swiglu": 2 * F})
    assert op(lora, "lookup", "embed").backward_moved == Poly()
    wide = profile_of(task="qlora r=32 all linear")
    assert op(wide, "mlp.down.lora_a").shape == (32, F)
    assert op(wide, "mlp.input").saved == Poly(bs=D)


def test_adapters_train_prefixes_and_scales() -> None:
    prefix = profile_of(task="finetune-adapter")
    names = [p.name for p in prefix.block_layers[0].params if not p.frozen]
    assert names == ["attention.prefix"]
    assert op(prefix, "attention.input").saved.bs == 0
    scales = profile_of(task="finetune-adapter_v2")
    assert op(scales, "mlp.up.scale").saved == Poly(bs=F)


def test_the_latent_of_a_token_is_multiplied_up() -> None:
    config = decoder(row())
    form = Variant(latent=variant(known_by_name(Row({"model": "deepseek-v3", "seq_len": "1"})), config).latent)
    found = profile(config, form)
    # Heads of 128 + 64 against values of 128: half of the sequence, scores and sum.
    assert op(found, "attention.core").flops == Poly(bss=HEADS * (192 + 128))
    assert op(found, "attention.query_up").shape == (HEADS * 192, 1536)
    assert op(found, "attention.latent").shape == (512 + 64, D)
    assert op(found, "attention.latent_up").shape == (HEADS * 256, 512)
    assert op(found, "attention.output").shape == (D, HEADS * 128)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("selective", ("core_attn",)),
        ("selective:core_attn+layernorm", ("core_attn", "layernorm")),
        ("selective:mlp", ("mlp",)),
        ("selective:moe_act", ("act",)),
        ("selective (core attention)", ("core_attn",)),
        ("selective op", ("op",)),
        ("selective: every 2", ()),
        ("minimal_flash", ("layernorm", "act")),
        ("full", ()),
        ("none (not stated)", ()),
    ],
)
def test_pieces_that_are_computed_again(text: str, pieces: tuple[str, ...]) -> None:
    assert recomputed(row(recompute=text)) == pieces


def test_a_piece_is_computed_again_and_what_it_kept_is_let_go() -> None:
    config = decoder(row())
    plain, mlp = profile(config), profile(config, Variant(again=("mlp",)))
    assert op(plain, "mlp.swiglu").saved == Poly(bs=3 * F)
    assert op(mlp, "mlp.swiglu").saved == Poly()
    assert op(mlp, "mlp.swiglu").working == Poly(bs=op(plain, "mlp.swiglu").working.bs + 3 * F)
    again = op(mlp, "mlp.up.again")
    assert (again.flops, again.backward_flops) == (Poly(), Poly(bs=2 * D * F))
    act = profile(config, Variant(again=("act",)))
    assert op(act, "mlp.swiglu").saved.bs == pytest.approx(2 * F)
    assert pieces_of("nonsense") == ()


def work_of(case: Case, numerics: Numerics) -> Work:
    found = profile(case.config, case.variant)
    return numerics.change(price(found, case.plans[0], sequence=case.sequence))


def test_blocks_multiply_in_fp8_after_a_cast() -> None:
    case = case_of(row(hardware="H100", precision="FP8-CS"))
    assert case.numerics == Numerics(matmul="fp8")
    computes = [task for task in work_of(case, case.numerics).computes if task.phase == "forward"]
    dtypes = {(task.layer, task.dtype) for task in computes if task.kind == "matmul"}
    assert dtypes == {("blocks", "fp8"), ("head", "bf16")}
    casts = {task.name: task.moved_bytes for task in computes if task.name.endswith(".cast")}
    # Query, key and value share one input, up and gate another: 2 bytes read, one written each way it is read.
    assert casts == {
        "attention.query.cast": 4 * S * D,
        "attention.output.cast": 4 * S * D,
        "mlp.up.cast": 4 * S * D,
        "mlp.down.cast": 4 * S * F,
    }
    assert guess_on(case, case.plans[0], cluster(case.machine)).step_seconds > 0


def test_tf32_is_what_nvidias_containers_mean_by_fp32() -> None:
    a100, v100 = preset("a100-80").device, preset("v100").device
    theirs = row(provenance="looked-up (github:NVIDIA/DeepLearningExamples README)", precision="fp32")
    assert numerics_of(theirs, a100) == Numerics(is_16_bit=False, matmul="tf32")
    assert numerics_of(theirs, v100) == numerics_of(row(precision="fp32"), a100) == Numerics(is_16_bit=False)
    case = case_of(row(precision="tf32"))
    tasks = [task for task in work_of(case, case.numerics).tasks if isinstance(task, Compute)]
    assert {task.dtype for task in tasks if task.kind == "matmul"} == {"tf32"}


def state(work: Work) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in work.residents:
        if item.life in ("always", "step"):
            found[item.category] = found.get(item.category, 0) + float(item.bytes * item.repeat)
    return found


def test_state_in_16_bits_and_quantised_weights() -> None:
    alone = {"gpus": "1", "dp": "1"}
    true = case_of(row(precision="bf16-true", **alone))
    count = profile(true.config).num_params
    assert true.numerics.keeps_16_bit
    held = state(work_of(true, true.numerics))
    assert held["parameters"] == held["gradients"] == 2 * count
    assert held["optimizer"] == 4 * count
    eight = case_of(row(precision="bf16-true", optimizer="8-bit AdamW", **alone))
    assert state(work_of(eight, eight.numerics))["optimizer"] == 2 * count

    packed = case_of(row(precision="bf16", task="finetune-qlora", **alone))
    form = profile(packed.config, packed.variant)
    matrices = LAYERS * (4 * D * D + 3 * D * F)
    lora = LAYERS * 2 * 2 * 8 * D
    rest = form.num_params - matrices
    held = state(work_of(packed, packed.numerics))
    assert held["parameters"] == pytest.approx(matrices * NF4_TWICE_BITS / 8 + rest * 2)
    assert held["gradients"] == 2 * lora
    unpacked = [t for t in work_of(packed, packed.numerics).computes if t.name.endswith("mlp.up.weight.unpack")]
    assert {t.phase for t in unpacked} == {"forward", "backward"}
    assert unpacked[0].moved_bytes == pytest.approx(D * F * (NF4_TWICE_BITS / 8 + 2))


def test_a_microbatch_that_is_not_told_is_the_largest_that_fits() -> None:
    asked: list[int] = []

    def roomy(case: Case) -> Guess:
        plan = next(plan for plan in case.plans if plan.microbatch <= 8)
        asked.extend(plan.microbatch for plan in case.plans)
        common = {"low_seconds": 1.0, "high_seconds": 2.0, "allocated_bytes": 1.0, "fits": True}
        return Guess(step_seconds=1.0, batch=plan.batch, **common)

    told = score_row(row(micro_batch="", global_batch="96"), roomy)
    assert asked == [4, 2, 1]  # of 12 samples on each replica
    assert told.time_error == pytest.approx(0.5)
    assert told.verdict == ""
    asked.clear()
    silent = row(micro_batch="", global_batch="", step_time_s="", tokens_per_s_per_gpu="512", dp="")
    found = score_row(silent, roomy)
    assert asked[0] == 1024
    # 8 samples of 128 tokens on each of 8 devices, 512 tokens a second each.
    assert found.real_seconds == pytest.approx(8 * 128 / 512)


def test_a_ladder_of_settings_is_climbed() -> None:
    def rung(name: str) -> Case:
        return case_of(
            row(framework="torchtune", recompute="", notes=f"cumulative ablation row: {name}; peak", gpus="1")
        )

    assert "compile" not in str(rung("+Packed dataset").plans[0])
    assert rung("+Chunked CE").plans[0].technique("chunked_loss") is not None
    full = rung("+Activation checkpointing")
    assert full.plans[0].technique("recompute") is not None
    assert full.numerics == Numerics(keeps_16_bit=True)
    last = rung("QLoRA")
    assert last.variant.lora is not None
    assert (last.numerics.weight_bits, last.numerics.offloads) == (NF4_TWICE_BITS, True)
    with pytest.raises(Unscored, match="not packed"):
        rung("Baseline")


def test_frameworks_have_habits() -> None:
    silent = {"zero_stage": "", "recompute": "", "sp": ""}
    alone = explained(row(framework="litgpt", gpus="1", **silent))
    together = explained(row(framework="litgpt", **silent))
    assert [each.text("recompute") for each in (alone, together)] == ["none", "full"]
    nemo = case_of(row(url="https://docs.nvidia.com/nemo-framework/performance.html", tp="2", **silent)).plans[0]
    assert "shard(size=4, stage=1)" in str(nemo)
    assert "tensor(size=2, sequence=True)" in str(nemo)


def test_a_length_that_is_the_longest_samples_says_nothing_of_time() -> None:
    longest = row(notes="seq_len = longest sample (peak driver)", peak_mem_gb="3", mem_unit="GB", mem_kind="allocated")
    found = measured(longest)
    assert (found.step_seconds, found.memory_bytes) == (None, 3e9)


def test_chunks_that_leave_room_for_the_ends() -> None:
    # 14 blocks and two ends over 2 stages of 4 chunks: two each, the first and the last one less.
    made = row(layers="14", pp="2", dp="4", vpp="4", schedule="interleaved-1F1B")
    staged = case_of(made).plans[0].technique("pipeline")
    assert getattr(staged, "stages", None) == (1, 2, 2, 2, 2, 2, 2, 1)


@pytest.mark.parametrize(
    ("cells", "name"),
    [
        ({"framework": "NeMo 24.07", "family": "gpt (Megatron-DeepSpeed)"}, "nemo"),
        ({"family": "gpt (Megatron-DeepSpeed)", "url": "https://arxiv.org/abs/2104.04473"}, "megatron-deepspeed"),
        ({"provenance": "looked-up (github:mosaicml/llm-foundry README.md)"}, "llm-foundry"),
        ({"url": "https://arxiv.org/abs/2104.04473", "hardware": "A100-SXM4-80GB"}, "megatron-lm"),
        ({"url": "https://arxiv.org/abs/2104.04473", "hardware": "A100-SXM4-80GB", "zero_stage": "3"}, "deepspeed"),
        ({"url": "https://github.com/NVIDIA/Megatron-LM", "hardware": "H100-SXM5-80GB (Eos)"}, "megatron-core"),
        ({"file": "hf_ultrascale_playbook", "source": "HF nanotron Ultra-Scale Playbook"}, ""),
    ],
)
def test_the_framework_is_what_a_row_says_and_never_a_tables_name(cells: dict[str, str], name: str) -> None:
    assert framework_of(row(**{"family": "", **cells})) == name


def test_fused_kernels_run_under_schedules_that_a_compiler_refuses() -> None:
    made = {"pp": "4", "dp": "2", "schedule": "ZB-2p"}
    eager, fused = (case_of(row(framework=name, **made)) for name in ("", "Megatron-LM"))
    seconds = [guess_on(case, case.plans[0], cluster(case.machine)).step_seconds for case in (eager, fused)]
    assert eager.plans == fused.plans
    assert seconds[1] < seconds[0]
