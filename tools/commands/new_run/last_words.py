"""The reward of a response. It runs in worker processes; what it prints is in the logs of the
run.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return a number, or a dict with "score". Replace this: 1 if the response ends with the words
    of the label.

    `solution_str` is the response without special tokens; the other arguments are the row's.
    """
    expected = ground_truth.split()
    words = solution_str.replace("####", " ").strip().rstrip(".").split()
    return float(words[-len(expected) :] == expected)
