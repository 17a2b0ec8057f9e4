"""More families of transformers, in which tensor parallelism is compared with a single device by `make soak`."""

from __future__ import annotations

from typing import Any

from trimtab.models.families import HEADS, HIDDEN, LAYERS, VOCABULARY, WIDTH, Family

_COMMON = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
_TEXT = {**_COMMON, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}
_BERT = {
    **_TEXT,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "intermediate_size": HIDDEN,
}
_LLAMA = {
    **_TEXT, "num_key_value_heads": 3, "intermediate_size": HIDDEN, "use_cache": False, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
_MIXTURE = {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
_IMAGE = {**_COMMON, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": HIDDEN,
          "image_size": 8, "patch_size": 4}  # fmt: skip
_GPT: dict[str, Any] = {
    "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "vocab_size": VOCABULARY, "n_positions": 32,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_TRANSLATION: dict[str, Any] = {
    "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN, "vocab_size": VOCABULARY,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2,
    "decoder_start_token_id": 1, "dropout": 0.0, "attention_dropout": 0.0, "use_cache": False,
}  # fmt: skip
_T5: dict[str, Any] = {
    "d_model": WIDTH, "d_kv": 4, "d_ff": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS, "dropout_rate": 0.0,
    "vocab_size": VOCABULARY, "decoder_start_token_id": 0,
}  # fmt: skip
_NEO: dict[str, Any] = {
    **_TEXT, "num_heads": HEADS, "num_layers": LAYERS, "attention_types": [[["global", "local"], 1]],
    "intermediate_size": HIDDEN, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_SWIN: dict[str, Any] = {
    "image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2,
    "drop_path_rate": 0.0,
}  # fmt: skip

_NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
_XLM: dict[str, Any] = {
    "emb_dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "vocab_size": VOCABULARY, "n_words": VOCABULARY,
    "dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 32,
}  # fmt: skip
_FUNNEL: dict[str, Any] = {
    "d_model": WIDTH, "n_head": HEADS, "d_inner": HIDDEN, "vocab_size": VOCABULARY, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
_STAGES: dict[str, Any] = {
    "image_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0,
}  # fmt: skip
_PVT: dict[str, Any] = {
    **_STAGES, "num_encoder_blocks": 1, "depths": [1], "sequence_reduction_ratios": [1], "hidden_sizes": [16],
    "patch_sizes": [4], "strides": [4], "num_attention_heads": [4], "mlp_ratios": [2],
}  # fmt: skip
_SEGFORMER: dict[str, Any] = {
    **_STAGES, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
    "classifier_dropout_prob": 0.0,
}  # fmt: skip
_RWKV: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
_JAMBA: dict[str, Any] = {
    **_LLAMA, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
}  # fmt: skip
_SPEECH: dict[str, Any] = {
    **_COMMON, "intermediate_size": HIDDEN, "vocab_size": VOCABULARY, "conv_dim": (8, 8), "conv_kernel": (10, 3),
    "conv_stride": (5, 2), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
    "classifier_proj_size": 8, "apply_spec_augment": False, "feat_proj_dropout": 0.0, "final_dropout": 0.0,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    **_LLAMA, "num_key_value_heads": HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": HIDDEN, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1,
}  # fmt: skip
_ROUTED: dict[str, Any] = {
    **_LLAMA, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "head_dim": 4,
    "moe_intermediate_size": HIDDEN, "first_k_dense_replace": 1,
}  # fmt: skip
_STATE: dict[str, Any] = {
    **_LLAMA, "mamba_n_heads": 6, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_d_head": 8, "mamba_chunk_size": 4
}  # fmt: skip
_TOWER = {**_COMMON, "intermediate_size": HIDDEN, "attention_dropout": 0.0}
_LED: dict[str, Any] = {
    **_TRANSLATION, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32, "attention_window": 4
}  # fmt: skip
_PROPHET: dict[str, Any] = {
    "hidden_size": WIDTH, "num_encoder_layers": LAYERS, "num_decoder_layers": LAYERS, "encoder_ffn_dim": HIDDEN,
    "decoder_ffn_dim": HIDDEN, "num_encoder_attention_heads": HEADS, "num_decoder_attention_heads": HEADS,
    "vocab_size": VOCABULARY, "max_position_embeddings": 32, "decoder_start_token_id": 1, "use_cache": False,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
_NLLB: dict[str, Any] = {
    **_TRANSLATION, "num_experts": 3, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0, "moe_token_dropout": 0.0, "expert_capacity": 64,
}  # fmt: skip
_DBRX: dict[str, Any] = {
    "d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": 32, "vocab_size": VOCABULARY,
    "resid_pdrop": 0.0, "emb_pdrop": 0.0, "use_cache": False,
    "attn_config": {"kv_n_heads": 3, "clip_qkv": 8.0, "rope_theta": 10000.0, "attn_pdrop": 0.0},
    "ffn_config": {"ffn_hidden_size": HIDDEN, "moe_num_experts": 4, "moe_top_k": 2},
}  # fmt: skip
_NEXT: dict[str, Any] = {
    **_MIXTURE, "head_dim": 4, "shared_expert_intermediate_size": HIDDEN, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

FURTHER: tuple[Family, ...] = (
    Family("Gemma", "GemmaForCausalLM", {**_LLAMA, "head_dim": 4}),
    Family("OLMo", "OlmoForCausalLM", _LLAMA),
    Family("StarCoder2", "Starcoder2ForCausalLM", {**_LLAMA, "residual_dropout": 0.0}),
    Family("Cohere", "CohereForCausalLM", _LLAMA),
    Family("Cohere2", "Cohere2ForCausalLM", _LLAMA),
    Family("StableLM", "StableLmForCausalLM", _LLAMA),
    Family("Granite", "GraniteForCausalLM", _LLAMA),
    Family("Phi", "PhiForCausalLM", {**_LLAMA, "resid_pdrop": 0.0}),
    Family("SmolLM3", "SmolLM3ForCausalLM", _LLAMA),
    Family("GLM4", "Glm4ForCausalLM", {**_LLAMA, "head_dim": 4}),
    Family("Nemotron", "NemotronForCausalLM", _LLAMA),
    Family("Persimmon", "PersimmonForCausalLM", {**_TEXT, "intermediate_size": HIDDEN, "use_cache": False}),
    Family("GPT-J", "GPTJForCausalLM", {**_GPT, "rotary_dim": 4}, eager=True),
    Family("GPT-Neo", "GPTNeoForCausalLM", _NEO, eager=True),
    Family("BART", "BartForConditionalGeneration", _TRANSLATION, "seq2seq"),
    Family("mBART", "MBartForConditionalGeneration", _TRANSLATION, "seq2seq"),
    Family("Pegasus", "PegasusForConditionalGeneration", _TRANSLATION, "seq2seq"),
    Family("Blenderbot", "BlenderbotForConditionalGeneration", _TRANSLATION, "seq2seq"),
    Family(
        "M2M100",
        "M2M100ForConditionalGeneration",
        {**_TRANSLATION, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        "seq2seq",
    ),
    Family("mT5", "MT5ForConditionalGeneration", _T5, "seq2seq"),
    Family("ELECTRA", "ElectraForMaskedLM", {**_BERT, "embedding_size": WIDTH}),
    Family(
        "DeBERTa-v2",
        "DebertaV2ForMaskedLM",
        {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        eager=True,
    ),
    Family("XLM-RoBERTa", "XLMRobertaForMaskedLM", _BERT),
    Family(
        "ModernBERT",
        "ModernBertForMaskedLM",
        {
            **_TEXT,
            "intermediate_size": HIDDEN,
            **dict.fromkeys(("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"), 0),
        },
    ),
    Family("Qwen2-MoE", "Qwen2MoeForCausalLM", {**_MIXTURE, "shared_expert_intermediate_size": HIDDEN}),
    Family("Qwen3-MoE", "Qwen3MoeForCausalLM", {**_MIXTURE, "head_dim": 4}),
    Family("DINOv2", "Dinov2ForImageClassification", {**_COMMON, "image_size": 8, "patch_size": 4}, "images"),
    Family("BEiT", "BeitForImageClassification", {**_IMAGE, "drop_path_rate": 0.0}, "images"),
    Family("Swin", "SwinForImageClassification", _SWIN, "images"),
    Family(
        "ConvNeXt",
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        "images",
        eager=True,
    ),
    Family("UMT5", "UMT5ForConditionalGeneration", _T5, "seq2seq"),
    Family(
        "BioGPT",
        "BioGptForCausalLM",
        {**_BERT, "use_cache": False, "activation_dropout": 0.0, "layerdrop": 0.0},
    ),
    Family("Marian", "MarianMTModel", _TRANSLATION, "seq2seq"),
    Family("CamemBERT", "CamembertForMaskedLM", _BERT),
    Family("RoFormer", "RoFormerForMaskedLM", _BERT, eager=True),
    Family("ERNIE", "ErnieForMaskedLM", _BERT),
    Family("XLM", "XLMWithLMHeadModel", _XLM, eager=True),
    Family("OpenAI GPT", "OpenAIGPTLMHeadModel", _GPT, eager=True),
    Family("CTRL", "CTRLLMHeadModel", {**_GPT, "dff": HIDDEN}, eager=True),
    Family("EXAONE 4", "Exaone4ForCausalLM", _LLAMA),
    Family("Helium", "HeliumForCausalLM", {**_LLAMA, "head_dim": 4}),
    Family("Ministral", "MinistralForCausalLM", {**_LLAMA, "head_dim": 4}),
    Family("Seed-OSS", "SeedOssForCausalLM", {**_LLAMA, "head_dim": 4, **_NO_DROPOUT}),
    Family("ERNIE 4.5", "Ernie4_5ForCausalLM", {**_LLAMA, "head_dim": 4}),
    Family("Arcee", "ArceeForCausalLM", _LLAMA),
    Family("GLM", "GlmForCausalLM", {**_LLAMA, "head_dim": 4}),
    Family("Apertus", "ApertusForCausalLM", _LLAMA),
    Family("LFM2", "Lfm2ForCausalLM", _LLAMA),
    Family(
        "Granite MoE", "GraniteMoeForCausalLM", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    Family("PhiMoE", "PhimoeForCausalLM", {**_LLAMA, "num_local_experts": 4}),
    Family(
        "FNet",
        "FNetForMaskedLM",
        {**_TEXT, "intermediate_size": HIDDEN, "hidden_dropout_prob": 0.0},
        eager=True,
    ),
    Family("LayoutLM", "LayoutLMForMaskedLM", _BERT, eager=True),
    Family("ViT-MSN", "ViTMSNForImageClassification", _IMAGE, "images"),
    Family("PVT", "PvtForImageClassification", _PVT, "images", eager=True),
    Family("BigBird", "BigBirdForMaskedLM", {**_BERT, "attention_type": "original_full"}, eager=True),
    Family(
        "RemBERT",
        "RemBertForMaskedLM",
        {**_BERT, "input_embedding_size": 8, "output_embedding_size": 8},
        eager=True,
    ),
    Family("ESM", "EsmForMaskedLM", {**_BERT, "mask_token_id": 1, "position_embedding_type": "rotary"}),
    Family("EuroBERT", "EuroBertForMaskedLM", _LLAMA),
    Family("NomicBERT", "NomicBertForMaskedLM", _BERT),
    Family("YOSO", "YosoForMaskedLM", {**_BERT, "use_expectation": True}, eager=True),
    Family("XLM-RoBERTa-XL", "XLMRobertaXLForMaskedLM", _BERT),
    Family("RoBERTa-PreLayerNorm", "RobertaPreLayerNormForMaskedLM", _BERT),
    Family("Megatron-BERT", "MegatronBertForMaskedLM", _BERT, eager=True),
    Family("Data2Vec", "Data2VecTextForMaskedLM", _BERT),
    Family("PLBart", "PLBartForConditionalGeneration", _TRANSLATION, "seq2seq"),
    Family(
        "BigBird-Pegasus",
        "BigBirdPegasusForConditionalGeneration",
        {**_TRANSLATION, "attention_type": "original_full"},
        "seq2seq",
        eager=True,
    ),
    Family("Blenderbot Small", "BlenderbotSmallForConditionalGeneration", _TRANSLATION, "seq2seq"),
    Family(
        "Switch Transformers",
        "SwitchTransformersForConditionalGeneration",
        {
            **_T5, "num_experts": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
            "router_jitter_noise": 0.0,
        },
        "seq2seq",
        eager=True,
    ),
    Family("NLLB-MoE", "NllbMoeForConditionalGeneration", _NLLB, "seq2seq", eager=True),
    Family("NanoChat", "NanoChatForCausalLM", _LLAMA),
    Family("CWM", "CwmForCausalLM", {**_LLAMA, "head_dim": 4}),
    Family("HunYuan", "HunYuanDenseV1ForCausalLM", {**_LLAMA, "head_dim": 4}),
    Family("GLM4-MoE", "Glm4MoeForCausalLM", _ROUTED),
    Family("dots.llm1", "Dots1ForCausalLM", {**_ROUTED, "n_shared_experts": 1}),
    Family(
        "ERNIE 4.5 MoE",
        "Ernie4_5_MoeForCausalLM",
        {
            **_LLAMA, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": HIDDEN, "moe_layer_start_index": 1
        },
    ),
    Family("Wav2Vec2", "Wav2Vec2ForSequenceClassification", _SPEECH, "wave"),
    Family("HuBERT", "HubertForSequenceClassification", _SPEECH, "wave"),
    Family("SEW", "SEWForSequenceClassification", {**_SPEECH, "squeeze_factor": 2}, "wave"),
    Family("UniSpeech", "UniSpeechForSequenceClassification", _SPEECH, "wave"),
    Family(
        "SigLIP",
        "SiglipForImageClassification",
        {"vision_config": {**_TOWER, "image_size": 8, "patch_size": 4}, "text_config": {**_TEXT, **_TOWER}},
        "images",
    ),
    Family(
        "DINOv2 with registers",
        "Dinov2WithRegistersForImageClassification",
        {**_COMMON, "image_size": 8, "patch_size": 4, "num_register_tokens": 2},
        "images",
    ),
    Family("I-JEPA", "IJepaForImageClassification", _IMAGE, "images"),
)  # fmt: skip
"""Trained as on a single device, attention and MLPs divided."""

IN_PART: tuple[Family, ...] = (
    Family("OLMo2", "Olmo2ForCausalLM", _LLAMA),
    Family("OLMoE", "OlmoeForCausalLM", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    Family("Bloom", "BloomForCausalLM", {**_GPT, "hidden_size": WIDTH}, eager=True),
    Family("GPT-BigCode", "GPTBigCodeForCausalLM", {**_GPT, "n_inner": HIDDEN}),
    Family("MPNet", "MPNetForMaskedLM", _BERT, eager=True),
    Family("DeepSeek-V3", "DeepseekV3ForCausalLM", _DEEPSEEK),
    Family("OLMo3", "Olmo3ForCausalLM", _LLAMA),
    Family("CodeGen", "CodeGenForCausalLM", {**_GPT, "rotary_dim": 4, "n_head": 4}, eager=True),
    Family("XLNet", "XLNetLMHeadModel", {**_FUNNEL, "n_layer": LAYERS, "dropout": 0.0}, eager=True),
    Family("Funnel", "FunnelForMaskedLM", {**_FUNNEL, "d_head": 4, "block_sizes": [1, 1]}, eager=True),
    Family("Swin V2", "Swinv2ForImageClassification", _SWIN, "images", eager=True),
    Family("SegFormer", "SegformerForImageClassification", _SEGFORMER, "images", eager=True),
    Family("RWKV", "RwkvForCausalLM", {**_RWKV, "context_length": 32, "use_cache": False}, eager=True),
    Family("Jamba", "JambaForCausalLM", _JAMBA, eager=True),
    Family("LED", "LEDForConditionalGeneration", _LED, "seq2seq", eager=True),
    Family("Longformer", "LongformerForMaskedLM", {**_BERT, "attention_window": 4}, eager=True),
    Family(
        "DeBERTa",
        "DebertaForMaskedLM",
        {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        eager=True,
    ),
    Family(
        "ConvBERT",
        "ConvBertForMaskedLM",
        {**_BERT, "embedding_size": WIDTH, "head_ratio": 2, "conv_kernel_size": 3},
        eager=True,
    ),
    Family(
        "MobileBERT",
        "MobileBertForMaskedLM",
        {**_BERT, "embedding_size": 8, "intra_bottleneck_size": 12, "true_hidden_size": 12, "num_attention_heads": 4},
        eager=True,
    ),
    Family(
        "Nystromformer",
        "NystromformerForMaskedLM",
        {**_BERT, "segment_means_seq_len": 8, "num_landmarks": 4},
        eager=True,
    ),
    Family("ProphetNet", "ProphetNetForConditionalGeneration", _PROPHET, "seq2seq", eager=True),
    Family("LongT5", "LongT5ForConditionalGeneration", {**_T5, "local_radius": 3}, "seq2seq", eager=True),
    Family("DBRX", "DbrxForCausalLM", _DBRX, eager=True),
    Family("DiffLlama", "DiffLlamaForCausalLM", {**_LLAMA, "num_key_value_heads": HEADS}, eager=True),
    Family(
        "MiniMax",
        "MiniMaxForCausalLM",
        {
            **_LLAMA, "head_dim": 4, "num_local_experts": 4, "block_size": 4,
            "layer_types": ["full_attention", "linear_attention"],
        },
        eager=True,
    ),
    Family("DeepSeek-V2", "DeepseekV2ForCausalLM", _DEEPSEEK),
    Family("FlexOlmo", "FlexOlmoForCausalLM", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    Family("Qwen3-Next", "Qwen3NextForCausalLM", _NEXT, eager=True),
    Family("Doge", "DogeForCausalLM", {**_LLAMA, "hidden_dropout": 0.0, "keep_window_size": 8}, eager=True),
    Family("Bamba", "BambaForCausalLM", {**_STATE, "attn_layer_indices": [1]}, eager=True),
    Family("Falcon-H1", "FalconH1ForCausalLM", {**_STATE, "mamba_d_ssm": 48}, eager=True),
    Family(
        "RecurrentGemma",
        "RecurrentGemmaForCausalLM",
        {
            **_LLAMA, "lru_width": WIDTH, "block_types": ["recurrent", "attention"], "attention_window_size": 8,
            "num_key_value_heads": 1,
        },
        eager=True,
    ),
    Family(
        "WavLM",
        "WavLMForSequenceClassification",
        {**_SPEECH, "num_buckets": 8, "max_bucket_distance": 16},
        "wave",
        eager=True,
    ),
)  # fmt: skip
"""Trained as on a single device, with a part of the layers whole on every rank.

Most often attention, whose heads share a norm, a bias or keys; the MLP of SegFormer and the Mamba layers of Jamba.
"""
