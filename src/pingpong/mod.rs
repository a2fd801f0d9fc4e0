//! Ping-pong between two ranks, with data checked on every iteration: the example of that name, and `gdasync bench`.

mod board;
mod floor;
mod judge;
mod kernels;
mod launches;
mod options;
mod pair;
mod player;
mod report;
mod window;
mod work;

pub use floor::floor;
pub use kernels::PTX;
pub use options::{Mode, Options};
pub use player::Player;
pub use report::{Line, Report};
pub use work::Work;
