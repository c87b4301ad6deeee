"""Who takes part: facts about clients, and live clients made from them."""
