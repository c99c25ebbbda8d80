"""Error of forests on operators that they have not seen: every profile, every operator.

Owns a table on standard output: one line for each device, model and tensor parallel size with the
mean over its operators and the worst of them, then attention and collectives. In percent, from
5-fold cross-validation. Takes minutes on one core.

    python -m scripts.operator_mape
"""

import numpy as np

from gllm.sim.costs import operators


def cross_validated_mape(
    samples: operators.OperatorSamples,
    folds: int = 5,
    seed: int = 0,
    num_trees: int = operators.NUM_TREES,
) -> float:
    """Mean absolute percentage error, in percent, of forests on samples they were not fitted to.

    The samples are shuffled once and dealt into folds. Each is held out in turn, and the errors of
    all samples weigh the same. Repeats of a key are one sample, so none is on both sides.
    """
    order = np.random.default_rng(seed).permutation(len(samples.milliseconds))
    errors = []
    for held in np.array_split(order, folds):
        rest = np.setdiff1d(order, held)
        model = operators.make_regressor(num_trees)
        model.fit(samples.features[rest], samples.milliseconds[rest])
        truth = samples.milliseconds[held]
        errors.append(np.abs(model.predict(samples.features[held]) - truth) / truth)
    return float(np.concatenate(errors).mean() * 100)


def main() -> None:
    """Print the table, a line as soon as it is known."""
    print(f"{'device':7}{'model':38}{'tp':>3}{'mean':>7}{'worst':>7}  operator")
    for device, model, tp in operators.list_profiled_models():
        samples = operators.token_samples(device, model, tp)
        errors = {name: cross_validated_mape(one) for name, one in samples.items()}
        mean = sum(errors.values()) / len(errors)
        worst = max(errors, key=errors.__getitem__)
        print(
            f"{device:7}{model:38}{tp:3}{mean:7.2f}{errors[worst]:7.2f}  {worst}",
            flush=True,
        )
    node = "a100_pairwise_nvlink"
    for name, samples_of_one in {
        "prefill attention": operators.prefill_samples(),
        "decode attention": operators.decode_samples(),
        "reshapes": operators.reshape_samples(),
        "all-reduce of 2": operators.collective_samples(node, "all_reduce", 2, 2),
        "send/receive within a node": operators.collective_samples(node, "send_recv", 2, 2),
        "send/receive across nodes": operators.collective_samples(node, "send_recv", 2, 1),
    }.items():
        print(f"{name:48}{cross_validated_mape(samples_of_one):7.2f}")


if __name__ == "__main__":
    main()
