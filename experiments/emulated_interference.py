"""Interference in a micro-batch, served by an engine on emulated devices (`--emulated`).

The engine composes the micro-batches of interference.py from requests that arrive, as on this
machine's engine (real_interference.py), and its steps take the times of the simulator's cost model.
So the page says which of the simulated figures the whole runtime keeps.
"""

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.interference import (
    REFERENCE,
    TETRI,
    InterferencePlan,
    interference_claims,
    interference_panels,
    interference_tables,
    simulate_steps,
)
from experiments.real_interference import QUICK_PLAN, measure_steps
from gllm.sim.metrics.plots import plot_grid

PLAN = InterferencePlan(
    light_peers=(1, 7),
    heavy_peers=(1, 7),
    decode_batches=(1, 8, 32),
    prompts=(18, 128, 512, 1024),
    mixed_batch=32,
    heavy_shares=(0.0, 0.5, 1.0),
)
"""OPT-13B has a context of 2,048 tokens. Prompts of one micro-batch have to arrive while the one
before is computed."""
ROUNDS = 1
MAX_MODEL_LEN = 2048
MAX_ERROR = 0.05
"""Largest difference between a served micro-batch and the simulated one."""


def run_emulated(options: ExperimentOptions) -> ExperimentResult:
    """Serve all micro-batches on emulated devices, beside their simulation."""
    plan, rounds = (QUICK_PLAN, 1) if options.quick else (PLAN, ROUNDS)
    served_name, simulated_name = f"{TETRI}, served", f"{TETRI}, simulated"
    simulated = simulate_steps(TETRI, plan)
    served = measure_steps(
        plan,
        rounds,
        TETRI.model,
        device=f"emulated:{TETRI.device}",
        tensor_parallel_size=(TETRI.ranks,),
        emulated_link="nvlink",
        max_model_len=MAX_MODEL_LEN,
    )
    series = {served_name: served, simulated_name: simulated}
    # The contexts of served decodes have grown by some tokens.
    worst = max(plan.all_steps(), key=lambda step: abs(served[step] / simulated[step] - 1))
    error = served[worst] / simulated[worst] - 1
    claims = [
        *interference_claims(str(TETRI), served, plan),
        PaperClaim(
            "largest difference of a served micro-batch from the simulated one",
            ExpectedLimit(MAX_ERROR),
            abs(error),
            f"({100 * error:+.1f} %, {len(worst.prompts)} prompts, {len(worst.contexts)} decodes)",
        ),
    ]
    text = (
        f"An engine on emulated devices: the whole runtime on this machine, with steps that take "
        f"the time of the simulator's cost model. Medians over {rounds} rounds or more, from the "
        "step log.\n\n" + interference_tables(series, plan)
    )
    return ExperimentResult(
        "Interference in a micro-batch, on emulated devices",
        text,
        claims,
        {
            "interference-emulated.svg": lambda path: plot_grid(
                interference_panels(series, plan), path
            )
        },
        REFERENCE,
        measured="emulated",
    )
