//! A client of mlx5 direct verbs with queues in its own memory, on the stand-in: what a card is asked for here, it gets there.

mod arena;
mod client;
mod events;
mod flow;
mod misuse;
mod processes;
#[path = "../setup/mod.rs"]
mod setup;
mod steps;
mod work;
