"""The models of a pair: a drafter and its config, and the target seen through its taps."""
