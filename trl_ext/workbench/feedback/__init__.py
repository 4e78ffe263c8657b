"""Label pairs of answers by a judge that is first compared with people, and have a model revise its answers."""
