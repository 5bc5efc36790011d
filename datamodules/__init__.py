"""Images for training and evaluation. Every loader yields the same batch, a dict of tensors:

    image   uint8    (B, 3, S, S)   RGB, contiguous, not normalised: each model normalises on its own device
    label   int64    (B,)           class index; class folders are numbered in sorted order; -1 if unknown
    index   int64    (B,)           position of the sample in the whole data set, the same in every process
    truth   boolean  (B, S, S)      True for pixels of the object; only if the data set annotates its objects

S is the side of an image, in pixels. The torch loader and the FFCV loader give the same samples in the same order.
"""
