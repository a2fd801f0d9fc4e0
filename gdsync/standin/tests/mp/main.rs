//! Ranks on a card that does not reach the memory of their (simulated) GPUs: `mp`'s own tests of messages, with all buffers there
//! and all streams on GPUs, and what is different.

use gdsync_testkit::driver::Control;

#[path = "../../../../mp/tests/it/common.rs"]
mod common;
#[path = "../../../../mp/tests/it/messages.rs"]
mod messages;
#[path = "../../../../mp/tests/it/on_stream.rs"]
mod on_stream;
#[path = "../it/setup.rs"]
mod setup;
mod staged;
#[path = "../../../../mp/tests/it/tagged.rs"]
mod tagged;

/// Runs before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = before_main;

extern "C" fn before_main() {
    setup::use_the_stand_in("");
    let control = Control::take();
    control.attribute(0, setup::DMA_BUF_SUPPORTED, 0);
    // As long as the process is there.
    std::mem::forget(control);
    for (name, value) in
        [("GDSYNC_DEVICE", setup::CARD), ("GDSYNC_TEST_GPU", "memop"), ("MP_LOCAL", "device")]
    {
        // SAFETY: there is no other thread yet.
        unsafe { std::env::set_var(name, value) };
    }
}
