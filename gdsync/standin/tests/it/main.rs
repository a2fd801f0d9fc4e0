//! `gdsync` over a stand-in for libibverbs and libmlx5, which checks its caller as kernel, provider and card would.
//!
//! The library takes the card's own route, which reads the rings directly, unless `GDSYNC_PATH` says otherwise.

#[path = "../../../tests/it/batch_run.rs"]
mod batch_run;
#[path = "../../../tests/it/child.rs"]
mod child;
#[path = "../../../tests/it/common.rs"]
mod common;
#[path = "../../../tests/it/devices.rs"]
mod devices;
#[path = "../../../tests/it/forks.rs"]
mod forks;
#[path = "../../../tests/it/card/lifecycle.rs"]
mod lifecycle;
#[path = "../../../tests/it/processes.rs"]
mod processes;
#[path = "../../../tests/it/queues.rs"]
mod queues;
mod setup;
#[path = "../../../tests/it/simulated.rs"]
mod simulated;
#[path = "../../../tests/it/stream_receives.rs"]
mod stream_receives;
#[path = "../../../tests/it/verbs.rs"]
mod verbs;
#[path = "../../../tests/it/verbs_device.rs"]
mod verbs_device;
#[path = "../../../tests/it/wraps.rs"]
mod wraps;

use std::env;

/// Runs before `main`, while there is no other thread.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = use_the_stand_in;

extern "C" fn use_the_stand_in() {
    setup::use_the_stand_in(&env::var("GDSYNC_PATH").unwrap_or_default());
}

/// What depends on the provider runs again through the CPU proxy: `ibv_post_send`, `ibv_poll_cq` and completion channels.
#[test]
fn proxy_passes_the_same_tests() {
    let (used, wire) = setup::used();
    if env::var_os("GDSYNC_PATH").is_some_and(|route| route == "proxy") {
        assert!(used.contains("proxy") && wire.contains("RoCE v2"), "{used}, {wire}");
        return;
    }
    assert_eq!((used.as_str(), wire.as_str()), ("mlx5 card mlx5_standin", "RoCE v2"));
    let mut again = std::process::Command::new(env::current_exe().unwrap());
    again.args([
        "proxy_passes",
        "verbs::",
        "queues::",
        "batch_run::",
        "processes::",
        "forks::",
        "verbs_device::",
    ]);
    let done = again.env("GDSYNC_PATH", "proxy").output().unwrap();
    let [out, err] = [&done.stdout, &done.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(done.status.success() && out.contains("proxy_passes_the_same_tests ... ok"), "{out}\n{err}");
}
