"""Images for training and evaluation. Every loader yields the same batch, a dict of tensors:

    image   uint8    (B, 3, S, S)   RGB, contiguous, not normalised: each model normalises on its own device
    label   int64    (B,)           class index; class folders are numbered in sorted order; -1 if unknown
    index   int64    (B,)           position of the sample in the whole data set, the same in every process
    truth   boolean  (B, S, S)      True in the boxes of the object; only if the data set has boxes

S is the side of an image, in pixels. The torch loader and the FFCV loader give the same samples in the same order.

A data set gives such samples by their positions, without the batch dimension; None for an image that cannot be decoded.
Its `fingerprint()` is a dict with a hash for each entry of a sample except `index`. The hash changes with the contents
and the order of that entry, and with nothing else, such as file names. What is computed from the samples is stored
under these hashes. A data set may have `classes`, the names of its classes in the order of their labels, and `labels`,
int64 (N,).
"""
