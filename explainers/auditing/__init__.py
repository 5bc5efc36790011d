"""What a classifier relies on over a whole data set: groups of evidence, and heads without some of them."""
