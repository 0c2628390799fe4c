"""What tests of core, server and families share: tiny checkpoints, fakes, and the conformance kit."""
