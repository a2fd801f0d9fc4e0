//! Waits for words on the CPU, against another thread that writes them.

use std::thread;
use std::time::Duration;

use gdsync::memory::Memory;
use gdsync::stream::Cond;
use mp::{Error, wait_value32, wait_value64};

const LONG: Duration = Duration::from_secs(60);
const NOW: Duration = Duration::ZERO;

/// Word, operand, and whether the condition holds: what CUDA says of its stream waits.
const CASES: [(Cond, u32, u32, bool); 18] = [
    (Cond::Geq, 5, 5, true),
    (Cond::Geq, 6, 5, true),
    (Cond::Geq, 4, 5, false),
    // Cyclic.
    (Cond::Geq, 2, u32::MAX, true),
    (Cond::Geq, u32::MAX, 2, false),
    (Cond::Geq, 1 << 31, 0, false),
    (Cond::Eq, 5, 5, true),
    // LibMP took "greater" for this.
    (Cond::Eq, 6, 5, false),
    (Cond::Eq, 4, 5, false),
    (Cond::And, 0b110, 0b010, true),
    (Cond::And, 0b101, 0b010, false),
    (Cond::And, 0, u32::MAX, false),
    (Cond::And, 1 << 31, u32::MAX, true),
    (Cond::Nor, 0, 0, true),
    (Cond::Nor, u32::MAX, 0, false),
    (Cond::Nor, u32::MAX - 1, 1, false),
    (Cond::Nor, u32::MAX - 3, 1, true),
    (Cond::Nor, 0, u32::MAX - 1, true),
];

fn wide(half: u32) -> u64 {
    u64::from(half) << 32 | u64::from(half)
}

#[test]
fn conditions_hold_as_on_streams() {
    let memory = Memory::alloc(16).unwrap();
    let (narrow, long) = (memory.word32(0).unwrap(), memory.word64(8).unwrap());
    for (cond, word, value, holds) in CASES {
        narrow.store(word);
        let found = wait_value32(&narrow, value, cond, NOW);
        assert_eq!(found.is_ok(), holds, "32: {word:#x} {cond:?} {value:#x}");
        if holds {
            assert_eq!(found.unwrap(), word);
        }
        long.store(wide(word));
        let found = wait_value64(&long, wide(value), cond, NOW);
        assert_eq!(found.is_ok(), holds, "64: {word:#x} {cond:?} {value:#x}");
    }
}

#[test]
fn waits_say_what_they_waited_for() {
    let memory = Memory::alloc(16).unwrap();
    let (narrow, long) = (memory.word32(0).unwrap(), memory.word64(8).unwrap());
    narrow.store(0x17);
    let text = wait_value32(&narrow, 0x18, Cond::Geq, Duration::from_millis(5)).unwrap_err().to_string();
    let addr = format!("{:#x}", narrow.addr());
    assert!(text.contains(&addr) && text.contains("Geq 0x18 (it is 0x17)") && text.contains("5ms"), "{text}");
    let error = wait_value64(&long, 1, Cond::Eq, NOW).unwrap_err();
    assert!(matches!(error, Error::Deadline { after: NOW, .. }), "{error}");
}

/// Also where nobody would ever give up.
#[test]
fn conditions_that_no_word_satisfies_are_refused() {
    let memory = Memory::alloc(16).unwrap();
    let (narrow, long) = (memory.word32(0).unwrap(), memory.word64(8).unwrap());
    let errors = [
        wait_value32(&narrow, 0, Cond::And, Duration::MAX).map(drop),
        wait_value32(&narrow, u32::MAX, Cond::Nor, Duration::MAX).map(drop),
        wait_value64(&long, 0, Cond::And, Duration::MAX).map(drop),
        wait_value64(&long, u64::MAX, Cond::Nor, Duration::MAX).map(drop),
    ];
    for error in errors.map(Result::unwrap_err) {
        assert!(error.to_string().contains("a condition that some word satisfies"), "{error}");
    }
    assert_eq!(wait_value64(&long, u64::from(u32::MAX), Cond::Nor, NOW).unwrap(), 0);
}

/// What was written before the word is seen after it, at every pause that the other thread may make.
#[test]
fn what_another_thread_writes_is_seen() {
    let memory = Memory::alloc(64).unwrap();
    let [ping, pong] = [0, 8].map(|at| memory.word64(at).unwrap());
    let (data, echo) = (memory.word32(16).unwrap(), memory.word32(20).unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1..=200_u32 {
                assert_eq!(wait_value64(&ping, n.into(), Cond::Geq, LONG).unwrap(), n.into());
                echo.store(data.load() + 1);
                if n % 50 == 0 {
                    // Long enough that the other side sleeps.
                    thread::sleep(Duration::from_millis(2));
                }
                pong.store(n.into());
            }
        });
        for n in 1..=200_u32 {
            data.store(n);
            ping.store(n.into());
            wait_value64(&pong, n.into(), Cond::Eq, LONG).unwrap();
            assert_eq!(wait_value32(&echo, n + 1, Cond::Eq, NOW).unwrap(), n + 1);
        }
    });
}
