"""What measures this project. Run on purpose (`python -m benchmarks.NAME --out FILE.json`), never by tests; results/ keeps what was measured."""
