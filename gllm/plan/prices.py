"""Prices of devices in US dollars per hour, one table for each paper.

A price belongs to the paper that states it: the figures of two papers are not comparable.
"""

import math
from collections.abc import Mapping

PRICE_TABLES: Mapping[str, Mapping[str, float]] = {
    "vidur": {"H100": 4.25, "A100-80G": 2.21, "A100-40G": 2.21, "A40": 1.28},
    "hexgen-2": {"H100": 3.69, "A100-80G": 1.72, "A100-40G": 1.72, "L40": 0.98, "A6000": 0.82},
    "splitwise": {"H100": 38 / 8, "A100-80G": 17.6 / 8, "A100-40G": 17.6 / 8},
    "molink": {"A100-80G": 1.16, "RTX4090": 0.26, "H20": 1.05},
}
"""Dollars per hour of one device by paper and by name of the device.

- vidur: the configuration of its code (arXiv 2405.05465).
- hexgen-2: least squares over the budgets of its settings (arXiv 2502.07903).
- splitwise: Table I's machines of eight GPUs (arXiv 2311.18677).
- molink: Table 4 of the platform paper; see DEVICES for the H20.
"""
DEFAULT_PRICES = "vidur"


def parse_prices(text: str) -> dict[str, float]:
    """Parse prices of devices and return them in US dollars per hour by device name.

    Args:
        text: A name of PRICE_TABLES, prices such as `H100=4.25,L20=0.7`, or a name followed by
            prices that replace or extend those of the table.

    Raises:
        ValueError: A table is unknown, or a price is not a number of at least 0.
    """
    prices: dict[str, float] = {}
    for index, part in enumerate(text.split(",")):
        name, is_price, number = (word.strip() for word in part.partition("="))
        if not is_price and index == 0 and name in PRICE_TABLES:
            prices |= PRICE_TABLES[name]
            continue
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not name or not 0 <= price < math.inf:
            raise ValueError(
                f"prices {text!r}: {part!r} is neither one of {', '.join(PRICE_TABLES)} nor "
                "DEVICE=DOLLARS_PER_HOUR, as in vidur,L20=0.7"
            )
        prices[name] = price
    return prices
