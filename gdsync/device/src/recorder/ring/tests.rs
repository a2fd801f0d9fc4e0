use std::os::unix::fs::FileExt as _;
use std::sync::Barrier;
use std::sync::atomic::AtomicBool;

use super::*;
use crate::recorder::{Liveness, Queue, Recording};

fn mark(number: u64, len: u32) -> Event {
    Event { len, ..Event::of(Stage::Mark, Queue::None, By::Cpu, 0, number) }
}

/// A value derived from a number.
fn value_of(number: u64) -> u32 {
    u32::try_from(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).unwrap()
}

fn read(recorder: &Recorder) -> Recording {
    Recording::read(recorder.path()).unwrap()
}

#[test]
fn a_ring_keeps_the_last_records_in_order() {
    let recorder = Recorder::start(128).unwrap();
    (0..300).for_each(|n| recorder.put(&mark(n, value_of(n))));
    let recording = read(&recorder);
    let numbers: Vec<_> = recording.records.iter().map(|record| record.event.number).collect();
    assert_eq!(numbers, (172..300).collect::<Vec<_>>());
    assert!(recording.records.iter().all(|record| record.event.len == value_of(record.event.number)));
    assert!(recording.records.is_sorted_by_key(|record| record.at));
    assert_eq!((recording.torn, recording.lost, recording.capacity), (0, 0, 128));
    assert_eq!((recording.pid, recording.liveness), (std::process::id(), Liveness::Alive));
    assert!(recording.begun <= recording.records[0].at && recording.last() <= recording.now);
    assert!(!recording.command.is_empty() && !recording.threads[recording.records[0].thread].name.is_empty());
}

#[test]
fn records_that_are_read_while_they_are_written_are_whole() {
    let recorder = Recorder::start(128).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3u64)
            .map(|writer| {
                let (recorder, stop) = (&recorder, &stop);
                scope.spawn(move || {
                    let mut n = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let number = writer << 32 | n;
                        recorder.put(&mark(number, value_of(number)));
                        n += 1;
                    }
                    n
                })
            })
            .collect();
        for _ in 0..200 {
            for record in read(&recorder).records {
                assert_eq!(record.event.len, value_of(record.event.number), "{record:?}");
            }
        }
        stop.store(true, Ordering::Relaxed);
        let written = writers.into_iter().map(|writer| writer.join().unwrap());
        let lasts: Vec<_> = written.enumerate().map(|(writer, n)| (writer as u64) << 32 | (n - 1)).collect();
        let recording = read(&recorder);
        assert_eq!(recording.torn, 0, "nobody writes any more");
        for last in lasts {
            assert!(recording.records.iter().any(|record| record.event.number == last), "{last:#x}");
        }
    });
}

#[test]
fn a_record_that_was_being_written_is_left_out() {
    let recorder = Recorder::start(128).unwrap();
    (0..3).for_each(|n| recorder.put(&mark(n, 0)));
    let thread_slot = OwnSlot::with(|own| own.index).unwrap().unwrap();
    let word = |slot: usize, word: usize| {
        recorder.memory.atomic64(layout::ring(thread_slot, 128) + slot * RECORD_BYTES + word * 8).unwrap()
    };
    // As a writer that was killed leaves it; and one of a place where it does not belong.
    word(1, 3).store(0, Ordering::Relaxed);
    (0..4).for_each(|at| word(9, at).store(word(2, at).load(Ordering::Relaxed), Ordering::Relaxed));
    let recording = read(&recorder);
    let numbers: Vec<_> = recording.records.iter().map(|record| record.event.number).collect();
    assert_eq!((numbers, recording.torn), (vec![0, 2], 1));
}

#[test]
fn a_wait_lasts_from_its_first_begin() {
    let recorder = Recorder::start(128).unwrap();
    let awaited = Awaited {
        queue: Queue::Receive,
        device: 1,
        qpn: 0x4_0101,
        number: 7,
        value: 0,
        posted: 9,
        completed: 6,
    };
    let put = |stage| recorder.put_wait(&awaited, stage, By::Cpu, recorder.stamp());
    put(Stage::WaitBegun);
    let [begun] = read(&recorder).waits[..] else { panic!() };
    assert_eq!((begun.awaited, begun.stage, begun.by), (awaited, Stage::WaitBegun, By::Cpu));
    put(Stage::WaitGivenUp);
    assert_eq!(read(&recorder).open_waits().count(), 0);
    put(Stage::WaitBegun);
    let [again] = read(&recorder).waits[..] else { panic!() };
    // To a nanosecond: the rate of the clock is measured anew each time.
    assert!(
        again.since.abs_diff(begun.since) < 100 + (again.changed - begun.since) / 100,
        "{begun:?} {again:?}"
    );
    assert!(again.changed > begun.changed && again.stage == Stage::WaitBegun);
    put(Stage::WaitEnded);
    let other = Awaited { number: 8, ..awaited };
    recorder.put_wait(&other, Stage::WaitBegun, By::Cpu, recorder.stamp());
    let [other] = read(&recorder).waits[..] else { panic!() };
    assert!(other.since > again.changed && other.awaited.number == 8, "another wait begins anew: {other:?}");
    assert_eq!(read(&recorder).records.len(), 5, "each step is a record, too");
}

#[test]
fn a_pause_records_nothing() {
    let recorder = Recorder::start(128).unwrap();
    recorder.put(&mark(1, 0));
    recorder.pause(true);
    recorder.put(&mark(2, 0));
    recorder.pause(false);
    recorder.put(&mark(3, 0));
    let numbers: Vec<_> = read(&recorder).records.iter().map(|record| record.event.number).collect();
    assert_eq!(numbers, [1, 3]);
}

#[test]
fn the_file_is_private_and_goes_with_the_recorder() {
    use std::os::unix::fs::PermissionsExt;
    let recorder = Recorder::start(128).unwrap();
    let path = recorder.path().to_owned();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let second = Recorder::start(128).unwrap();
    assert_ne!(second.path(), path, "each has one of its own");
    drop(recorder);
    assert!(!path.exists() && second.path().exists());
    assert!(Recording::read(&path).unwrap_err().to_string().contains("--list"));
}

#[test]
fn a_forked_child_writes_nothing_to_the_file_of_its_parent_and_leaves_it_there() {
    let recorder = Recorder::start(128).unwrap();
    recorder.put(&mark(1, 0));
    // SAFETY: the child only calls what needs no other thread, and ends without unwinding.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        recorder.put(&mark(2, 0));
        recorder.set_rank(5);
        let is_ours = recorder.is_of_this_process();
        drop(recorder);
        // SAFETY: it ends the child at once.
        unsafe { libc::_exit(i32::from(is_ours)) };
    }
    let mut status = 0;
    // SAFETY: the pointer is valid for one integer.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    let recording = read(&recorder);
    let Recording { torn, lost, rank, .. } = recording;
    assert_eq!((recording.records.len(), torn, lost, rank), (1, 0, 0, None));
    recorder.put(&mark(3, 0));
    assert_eq!(read(&recorder).records.len(), 2, "the parent goes on");
}

#[test]
fn files_that_are_no_recordings_are_refused() {
    let recorder = Recorder::start(128).unwrap();
    recorder.put(&mark(1, 0));
    let whole = fs::read(recorder.path()).unwrap();
    let folder = std::env::temp_dir().join(format!("gdsync-recorder-test-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("file");
    let read = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        Recording::read(&path)
    };
    assert_eq!(read(&whole).unwrap().records.len(), 1, "a copy is as good");
    let short = [0, 7, 200, 4096, layout::RINGS, whole.len() - 1];
    for length in short {
        assert!(read(&whole[..length]).is_err(), "{length} bytes");
    }
    for (word, value) in [
        (header::MAGIC, 0),
        (header::RECORDS, 0),
        (header::RECORDS, 129),
        (header::RECORDS, u64::MAX),
        (header::RECORDS, 1 << 40),
        (header::CLOCK, 9),
        (header::PID, u64::MAX),
    ] {
        let mut bytes = whole.clone();
        bytes[word * 8..word * 8 + 8].copy_from_slice(&value.to_ne_bytes());
        assert!(read(&bytes).is_err(), "word {word} is {value:#x}");
    }
    assert!(Recording::read(&folder).is_err() && Recording::read("/dev/null".as_ref()).is_err());
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn names_that_processes_choose_are_safe_to_print() {
    let recorder = Recorder::start(128).unwrap();
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("\x1b[2J".into());
        thread.spawn_scoped(scope, || recorder.put(&mark(1, 0))).unwrap().join().unwrap();
    });
    let mut bytes = fs::read(recorder.path()).unwrap();
    bytes[header::COMMAND * 8..][..8].copy_from_slice(b"\x1b[31mEV\x07");
    let path = std::env::temp_dir().join(format!("gdsync-names-{}", std::process::id()));
    fs::write(&path, bytes).unwrap();
    let recording = Recording::read(&path);
    fs::remove_file(&path).unwrap();
    let recording = recording.unwrap();
    assert!(recording.command.starts_with("\\u{1b}[31mEV\\u{7}"), "{}", recording.command);
    assert!(recording.threads.iter().any(|thread| thread.name == "\\u{1b}[2J"));
}

#[test]
fn living_threads_have_different_slots() {
    let barrier = Barrier::new(8);
    let slot = || {
        let thread_slot = OwnSlot::with(|own| own.index).unwrap().unwrap();
        assert_eq!(OwnSlot::with(|own| own.index).unwrap(), Some(thread_slot), "it stays");
        barrier.wait();
        thread_slot
    };
    let mut thread_slots: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(slot)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    thread_slots.sort_unstable();
    thread_slots.dedup();
    assert_eq!(thread_slots.len(), 8);
}

#[test]
fn slots_are_freed_when_threads_end() {
    // Twice as many as there are slots.
    for _ in 0..2 * THREAD_SLOTS {
        std::thread::spawn(|| assert!(OwnSlot::with(|own| own.index).unwrap().is_some())).join().unwrap();
    }
}

/// Reading a recording with any words changed returns a bounded number of records and printable names.
#[test]
fn any_words_in_a_recording_are_survived() {
    let recorder = Recorder::start(128).unwrap();
    let stages = [Stage::Prepared, Stage::Submitted, Stage::Refused, Stage::Mark];
    for (number, stage) in (0..).zip(stages) {
        recorder.put(&Event { stream: 1, ..Event::of(stage, Queue::Send, By::Cpu, 7, number) });
    }
    let whole = fs::read(recorder.path()).unwrap();
    let path = std::env::temp_dir().join(format!("gdsync-words-{}", std::process::id()));
    fs::write(&path, &whole).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    let parts = [0, layout::THREADS, layout::WAITS, layout::ROWS, layout::RINGS];
    bolero::check!().with_type::<Vec<(u8, u8, u64)>>().for_each(|changes| {
        let places = changes.iter().map(|&(part, word, change)| {
            // All of the header, and the first words of each part.
            let at = parts[usize::from(part) % parts.len()] + usize::from(word % 32) * 8;
            (at, change)
        });
        for (at, change) in places.clone() {
            let word = u64::from_ne_bytes(*whole[at..].first_chunk().unwrap()) ^ change;
            file.write_all_at(&word.to_ne_bytes(), at as u64).unwrap();
        }
        if let Ok(recording) = Recording::read(&path) {
            assert!(recording.records.len() < 2 << 20, "{} records", recording.records.len());
            recording.last();
            let names = recording.threads.iter().map(|thread| &thread.name).chain([&recording.command]);
            assert!(names.flat_map(|name| name.chars()).all(|letter| !letter.is_control()));
        }
        for (at, _) in places {
            file.write_all_at(&whole[at..at + 8], at as u64).unwrap();
        }
    });
    fs::remove_file(&path).unwrap();
}
