"""Text of the page about HexGen-2."""

REFERENCE = 'Jiang et al., "HexGen-2", ICLR 2025 (arXiv 2502.07903)'
SETTING = """\
Llama-2-70B. Workloads are the requests of Azure's conversations with prompts above (HP) or up to
(LP) 512 tokens, and outputs above (HD) or up to (LD) 128. Costs are the simulator's roofline, the
batch is what memory holds, prices are HexGen-2's. Latencies and bandwidths of the links are
assumptions (`gllm/plan/data/hexgen2_clusters.yaml`): the paper's matrices are pictures. Figures are
output tokens per second at the maximum flow; *colocated* is the best division into engines that run
both phases (the optimum of HexGen's search), *DistServe* equal replicas of each phase, *vLLM* the
best colocated engines, both on 8 x H100."""
BANDWIDTH = "Setting 1 with every bandwidth halved and doubled.\n\n"
SIMULATION = """\
Requests/s of the estimates beside the simulator's at 1.15 times the estimate: plans (flow) and
colocated engines, which compute whole prompts before decodes. OPT-30B on `case-e` (4 H100,
4 A100) has prefill engines that hold two or three long prompts.

"""
CHUNKING = """\
Simulated requests/s of colocated engines on setting 1: whole prompts before decodes (policy
`vllm`), or chunks of prompts beside decodes (`sarathi`, 2,048 tokens). *Best* is the better one of
two divisions: the optimum of the estimate, and the one with at most two stages per engine. The
paper's gains are those of its appendix D, read as gains of colocated engines.

"""
ONLINE = """\
Conversations of all lengths, Poisson arrivals at 75 % of the simulated peak; output tokens per
second. Setting 1 for HexGen-2 (plan) and HexGen (colocated), 8 x H100 for the others.

"""
DEADLINES = """\
Deadlines (SLO scales, as in Fig. 8) that the requests keep on setting 1, in multiples of the time
of the request alone on 8 x H100, at 75 % of the colocated peak. *Few stages*: the colocated optimum
with at most two stages per engine.

"""
RULES_TEXT = """\
Gain of the plan over the colocated optimum on setting 1 by `--costs` and `--credit`: *literal* is
the paper's formula, *credited* a reading of it that gives some groups of [the paper's
placements](hexgen2-placements.md).

"""
SEARCH = """\
HPHD on setting 1 from the same first partition, {num_seeds} seeds: mean flow in requests/s after a
number of partitions.

"""
SCALE = """\
Searches until no change improves the first local optimum, in the proportions of setting 1. The
paper's minutes are those of its machine.

"""
CAUSES = """\
By estimates the plan gains +9 % over colocated engines, the paper measures +40 %. The estimate of
the colocated engines is the stronger one: it has no bubbles between micro-batches of prompts and of
decodes. In the simulator colocated engines with whole prompts serve 6 to 34 % less than their
estimate (20 % on average), plans 5 % less to 11 % more (0 %), and the plan's mean gain is +37 %.
Short pipelines (*best*) and chunked prefill help colocated engines: on setting 1 the plan gains
+46 % over the best with whole prompts and +34 % over the best with chunks (means of the columns
above). Second, the rule of capacities: with the paper's formula (*literal*) the estimated gain on
setting 1 is +36 % in place of +27 %, over all four settings +22 % in place of +9 %; *credited*, at
Table 1's costs, +36 % and +30 %. Batches of 64, 128 or 256 requests in place of 512 change the mean
gain by no more than a point, halved or doubled bandwidths by up to five on setting 1. Over
DistServe on 8 x H100 no gain is left: setting 1 has 73 % of their FLOP/s and 106 % of their memory
bandwidth. At our mean lengths the paper's vLLM computes with 2 to 6 % of the FLOP/s of 8 x H100,
its HexGen-2 with 4 to 14 % of setting 1's; what limits its H100s is none of these costs."""
NOTES = """\
- *Absolute figures* are above the paper's by 1.6 to 18 times, most where outputs are long. A batch
  here is as large as memory allows (up to 512 requests), and the paper's figures are those of its
  engine. Gains are compared, absolute figures are not.
- *Table 4.* On equal devices estimates of colocated engines are as high as those of plans, for the
  reason above; the plan is DistServe's, as in the paper where outputs are long (-1 and -2 %).
- *Chunked prefill.* The base of appendix D's gains is not known here. Read as gains of colocated
  engines they agree for three workloads; with LPHD's short prompts chunks gain nothing, because
  whole prompts hold decodes up for little time.
- *Deadlines.* Fig. 8 is a picture; 1.5 is the paper's figure for latency. The optimum by throughput
  has pipelines of up to eleven stages for HPLD, so its deadlines are far longer there.
- *The flow* is that of mean lengths without queues. One of twenty simulated plans serves more than
  15 % less: OPT-30B on `case-e`, HPLD. Its prefill engines hold three prompts, its decode engine is
  94 % full; prompts that wait for it (0.3 s on average) block the prefill engines, and some are
  evicted and computed again. The memory of held prompts is no limit by itself: at 0.25 s of prefill
  and 0.1 s of transfer three prompts are enough for twice the flow. An earlier miss, HPLD on
  setting 2 (-22 %), was none of the flow: DistServe's limit of 5 % of the KV cache for prompts
  before their decode left one prompt in a pipeline of three stages (now prompts that another engine
  decodes do not count), and samples of a class followed the hour of the trace, whose prompts are
  3,200 tokens long in its middle and 2,000 at its end.
- *Order of changes.* The guided search is ahead after 75 partitions and after 1,200, but after 300
  random swaps are better in 7 of 15 seeds: the guided search stays in its first optimum until it
  has compared all its neighbours, random ones end in a better optimum by luck.
- *Setting 1.* The paper's text has 4 L40 and 8 A6000, but both of its placements use 8 L40 and
  4 A6000, whose price fits the budget (28.82 $/h for 28.8); the shipped cluster `het1-placed` has
  these.
- *Table 5.* [hexgen2-opt](hexgen2-opt.md) has searches over more than 128 devices."""
