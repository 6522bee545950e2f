"""Latent attention of few queries, whose values are a part of the keys, for sm_90 in Gluon."""
