//! GPU memory, with a driver whose memory the CPU cannot touch.

use crate::robustness::build;
use crate::{card, finish, library, start, succeeded};

#[test]
fn gpu_memory_is_registered_and_gpus_ring_doorbells() {
    let Some(program) = build("gpu", include_str!("gpu.c"), &["-libverbs", "-lmlx5"]) else { return };
    let arguments = ["-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"];
    let Some(driver) = build("cuda", include_str!("libcuda.c"), &arguments) else { return };
    let dir = driver.parent().expect("it is in a directory");
    // Found under all names before that of the system.
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::os::unix::fs::symlink(&driver, dir.join(name)).expect("a directory of this test");
    }
    let arguments = ["-shared", "-fPIC", "-fvisibility=hidden"];
    let Some(interposer) = build("interposer", include_str!("interposer.c"), &arguments) else { return };
    let outputs = [None, Some(&interposer)].map(|interposer| {
        let mut command = card(program.to_str().expect("temporary directories have plain names"), "eth");
        command.arg(dir.join("libcuda.so.1")).env("LD_LIBRARY_PATH", dir).env("GDASYNC_CARD_LOG", "-");
        if let Some(interposer) = interposer {
            let both = [library(), interposer.clone()].map(|path| path.display().to_string());
            command.env("LD_PRELOAD", both.join(":"));
        }
        finish(start(&mut command))
    });
    for file in [&program, &driver, &interposer] {
        std::fs::remove_dir_all(file.parent().expect("it is in a directory")).expect("it is ours");
    }
    for output in outputs {
        assert_eq!(succeeded("gpu.c", &output), "payload\ndoorbell\ndone\n");
    }
}
