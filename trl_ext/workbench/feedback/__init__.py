"""Label pairs of answers by a judge that is first compared with people."""
