"""Programs of `memoire demo`: a launcher, a learner and actors on CartPole."""
