"""Attention for sm_90 in Gluon: TMA, warps that load and warpgroups that multiply."""
