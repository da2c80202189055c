"""The theorems in practice: rates in ε, restarts under the PL condition, choices left open by the paper."""
