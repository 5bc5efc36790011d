"""Images for training and for evaluation. Every loader gives the same batch, a dict of tensors:

    image   uint8    (B, 3, S, S)   RGB, contiguous, never normalised: every model normalises for itself, on its device
    label   int64    (B,)           the class, by the sorted names of the classes; -1 where it is not known
    index   int64    (B,)           the sample's position in the whole data set, in every process
    truth   boolean  (B, S, S)      the pixels that hold the object; only where the data set knows them

S is the side of an image. Whether torch or FFCV decodes the files, the samples and their order are the same.
"""
