"""Codecs, which send tensors in fewer bits, and the kernels of the block codec."""

from trimtab.codec.codec import Block, Codec, Uncompressed
from trimtab.codec.error_feedback import ErrorFeedback
from trimtab.codec.powersgd import PowerSGD
from trimtab.codec.topk import TopK

__all__ = ["Block", "Codec", "ErrorFeedback", "PowerSGD", "TopK", "Uncompressed"]
