"""Images for training and evaluation. Every loader yields the same batch, a dict of tensors:

    image   uint8    (B, 3, H, W)   RGB, contiguous, H = W, not normalised: each model normalises on its own device
    label   int64    (B,)           class index; class folders are numbered in sorted order; -1 if unknown
    index   int64    (B,)           position of the sample in the whole data set, the same in every process
    truth   boolean  (B, H, W)      True in the boxes around the object, or on its mask; only if the data set has them

The torch loader and the FFCV loader yield the same samples in the same order.

A data set returns one such sample for each position, without the batch dimension, or None for an image that cannot be
decoded. Its `fingerprint()` is a dict with a hash for each entry of a sample except `index`. A hash changes with the
contents and the order of its entry, and with nothing else: file names do not count. What is computed from the samples
is stored under these hashes. A data set may have `classes`, the names of its classes in the order of their labels, and
`labels`, one int64 for each sample.
"""
