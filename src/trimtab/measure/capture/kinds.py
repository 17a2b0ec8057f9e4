"""The kind of each torch operator."""

from __future__ import annotations

from trimtab.workload.operator import Kind

_KINDS: dict[Kind, str] = {
    "conv": "convolution convolution_overrideable cudnn_convolution mkldnn_convolution miopen_convolution",
    "matmul": "mm bmm addmm baddbmm addbmm addmv mv dot linear _grouped_mm",
    "embedding": "embedding embedding_bag _embedding_bag embedding_renorm",
    "norm": "native_layer_norm native_batch_norm native_group_norm cudnn_batch_norm miopen_batch_norm "
    "_native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update _fused_rms_norm "
    "_batch_norm_no_update rms_norm",
    "softmax": "_softmax _log_softmax _safe_softmax logsumexp",
    "loss": "nll_loss_forward nll_loss2d_forward mse_loss binary_cross_entropy_with_logits binary_cross_entropy "
    "smooth_l1_loss huber_loss l1_loss kl_div",
    "activation": "gelu relu relu_ silu silu_ sigmoid tanh tanh_ leaky_relu elu hardswish hardsigmoid hardtanh mish "
    "softplus glu prelu _prelu_kernel exp sin cos erf sqrt rsqrt pow threshold log_sigmoid_forward",
    "dropout": "native_dropout bernoulli bernoulli_ _fused_dropout rand rand_like rand_like_generator",
    "reduce": "sum mean amax amin max min argmax argmin any all var std var_mean std_mean linalg_vector_norm norm "
    "prod cumsum count_nonzero logical_all",
    "pool": "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d "
    "upsample_bilinear2d upsample_bicubic2d max_pool2d mkldnn_max_pool2d avg_pool1d",
    "copy": "clone copy copy_ cat stack constant_pad_nd repeat roll flip _pin_memory tril triu contiguous "
    "split_with_sizes_copy masked_fill masked_fill_ where _unsafe_index_put index_put index_put_ scatter "
    "slice_scatter select_scatter",
    "index": "index index_select gather take _unsafe_index",
    "fill": "arange full empty zeros ones scalar_tensor zeros_like ones_like full_like empty_like new_zeros new_ones "
    "new_full new_empty zero_ fill_ fill eye linspace randn randint empty_strided lift_fresh_copy normal_ uniform_",
    "elementwise": "add sub mul div neg abs rsub clamp clamp_min clamp_max maximum minimum eq ne lt le gt ge "
    "logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not add_ mul_ sub_ div_ addcmul addcdiv floor "
    "ceil round remainder fmod sign log reciprocal square isnan isinf isfinite bitwise_xor floor_divide lerp "
    "erfinv sgn",
}
_BY_NAME: dict[str, Kind] = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def kind_of_target(packet: str) -> Kind:
    """The kind of ``aten.<packet>.<overload>``; `other` if it is not listed."""
    if packet.startswith(("_scaled_dot_product", "scaled_dot_product")):
        return "attention"
    return _BY_NAME.get(packet, "other")
