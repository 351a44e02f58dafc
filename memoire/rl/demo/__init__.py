"""What `memoire demo` runs: a learner and actors on CartPole."""
