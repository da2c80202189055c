"""The theorems, measured: steps against ε, restarts under the PL condition, and what the text leaves open."""
