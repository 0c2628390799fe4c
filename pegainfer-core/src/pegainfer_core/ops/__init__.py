"""Operations that families build models from. Each has a plain torch implementation (the CPU path and the oracle).

Fast paths sit behind the same function and are chosen in one place.
"""
