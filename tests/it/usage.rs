//! Options, help and errors of every program, and outputs that cannot be written.

use std::fs::File;

use super::common::{command, run, succeeds};

/// Command lines, and what their help has.
const HELP: &[(&str, &str)] = &[
    ("gdasync --help", "bench|card|doctor|gdrcopy|plot|report|trace|Usage: gdasync"),
    ("gdasync bench --help", "latency|bandwidth|messages|copy|trigger|stream|scale"),
    ("gdasync bench latency --help", "What the numbers mean|--json|--budget"),
    ("gdasync bench bandwidth --help", "What the numbers mean|--json|--budget"),
    ("gdasync bench messages --help", "What the numbers mean|--json|--budget"),
    ("gdasync bench copy --help", "What the numbers mean|--json|--budget"),
    ("gdasync bench trigger --help", "What the numbers mean|--json|--budget"),
    ("gdasync bench stream --help", "What the numbers mean|--json|--budget"),
    ("gdasync bench scale --help", "What the numbers mean|--json|--budget"),
    ("gdasync card --help", "--link|--devices|PROGRAM|GDASYNC_CARD_LOG"),
    ("gdasync doctor --help", "--only|--json|--list|--timeout"),
    ("gdasync trace --help", "3 a wait is stuck|--perfetto|--stuck-after|--clean"),
    (
        "pingpong --help",
        "--modes|--sizes|--iters|--ahead|--stream|--payload|--placement|--via|--device|--kernel-us|--no-kernels|--timeout|--budget|--json|--version|Example:",
    ),
    ("producer_consumer --help", "--blocks|--bytes|--slots|--produce-us|--consume-us|--timeout|Example:"),
    ("gdrcopy_copybw -h", "-s|-c|-o|-l|-w|-r|-d|-a|-M|--json|--backend"),
    ("gdrcopy_copylat -h", "-s|-c|-C|-w|-r|-d|-a|-M|--json|--backend"),
    ("gdrcopy_apiperf -h", "-s|-n|-w|-d|-a|-M|--json|--backend"),
    ("gdrcopy_pplat -h", "-t|-u|-s|-B|-T|-m|-G|-C|-D|-d|-a|-M|--flush|--json|--backend"),
    ("gdrcopy_sanity -h", "-v|-s|-l|-t|-d|--cycles|--threads|--timeout|--json|--backend"),
];

#[test]
fn help_has_every_option() {
    for (line, words) in HELP {
        let help = succeeds(command(line));
        for word in words.split('|') {
            let mut options = help.split([' ', ',', '[', '\n']);
            let has =
                if word.starts_with('-') { options.any(|one| one == word) } else { help.contains(word) };
            assert!(has, "{word} is not in {line}:\n{help}");
        }
        assert!(!help.contains("--live"), "an option of the doctor for itself");
        // The same tool as a subcommand.
        if let Some(name) = line.strip_prefix("gdrcopy_") {
            let alone = succeeds(command(&format!("gdasync gdrcopy {name}")));
            let options = |help: &str| help[help.find("Options:").unwrap()..].to_owned();
            assert!(options(&alone).starts_with(options(&help).split("\n  -V").next().unwrap()));
        }
    }
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(succeeds(command("gdasync --version")), format!("gdasync {version}\n"));
    assert!(succeeds(command("pingpong --version")).contains(version));
}

const NOWHERE: &str = "/proc/no/such/folder/results.json";

/// Command lines, the exit status, and what is said.
const ERRORS: &[(&str, i32, &str)] = &[
    ("gdasync", 2, "Usage"),
    ("gdasync bench", 2, "Usage"),
    ("gdasync bench gpu", 2, "gpu"),
    ("gdasync bench latency --json -", 1, "name a file"),
    ("gdasync bench latency --modes fast", 2, "--modes|stream, graph, initiate, sync, cpu"),
    ("gdasync bench latency --kernel-us 5 --no-kernels", 1, "--kernel-us|--no-kernels"),
    ("gdasync bench latency --timeout 18446744073709551615", 2, "--timeout"),
    ("gdasync bench bandwidth --sizes 0", 2, "--sizes|0"),
    ("gdasync bench bandwidth --budget 0", 2, "--budget|0"),
    ("gdasync bench bandwidth --outstanding 257", 2, "--outstanding|257"),
    ("gdasync bench bandwidth --via memop", 1, "--via is for --stream cuda"),
    ("gdasync bench messages --sizes 0", 2, "--sizes"),
    ("gdasync bench messages --modes fast", 2, "sync, async, tagged, rate"),
    ("gdasync bench scale --ranks 1", 2, "--ranks|1"),
    ("gdasync bench scale --qps 1025", 2, "--qps|1025"),
    ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=9 gdasync bench scale", 1, "without a launcher"),
    ("gdasync bench stream --calls 99", 2, "--calls"),
    ("gdasync bench trigger --busy 0,17", 2, "--busy"),
    ("gdasync bench trigger --busy a", 2, "--busy"),
    ("gdasync bench trigger --rounds 19", 2, "--rounds"),
    ("gdasync bench trigger --timeout 0", 2, "--timeout"),
    ("gdasync card", 2, "PROGRAM"),
    ("gdasync card --link fast true", 2, "--link|ib, eth"),
    ("gdasync card --devices 0 true", 2, "--devices"),
    ("gdasync doctor --only gpus", 2, "--only gpus: there is no such probe or area"),
    ("gdasync doctor --timeout 0", 2, "--timeout"),
    ("gdasync doctor --live moon", 2, "moon"),
    ("gdasync doctor --fix", 2, "--fix"),
    ("gdasync trace --perfetto a.json", 2, "PID|FILE"),
    ("gdasync trace --list 1", 2, "--list"),
    ("gdasync trace --clean --json", 2, "--json"),
    ("gdasync trace --stuck-after x 1", 2, "--stuck-after"),
    ("gdasync trace /no/such/file", 1, "--list"),
    ("gdasync trace /dev/null", 1, "not a regular file"),
    ("gdasync trace 4294967295", 1, "has ended in order"),
    ("gdasync plot /no/such/file.json -o a.svg", 1, "/no/such/file.json|No such file"),
    ("pingpong --sizes 0", 2, "--sizes|0 is not in"),
    ("pingpong --sizes 8,1073741825", 2, "--sizes|1073741825"),
    ("pingpong --sizes eight", 2, "--sizes|eight"),
    ("pingpong --modes fast", 2, "--modes|fast|stream, graph, initiate, sync, cpu"),
    ("pingpong --modes floor", 2, "--modes|floor"),
    ("pingpong --iters 0", 2, "--iters"),
    ("pingpong --modes graph --no-kernels", 1, "mode graph|--no-kernels"),
    ("pingpong --modes initiate", 1, "mode initiate|--stream cuda --via kernel"),
    ("pingpong --modes initiate --no-kernels", 1, "mode initiate|--no-kernels"),
    ("pingpong --ahead 201", 2, "--ahead|201"),
    ("pingpong --timeout 0", 2, "--timeout"),
    ("pingpong --timeout 18446744073709551615", 2, "--timeout"),
    ("pingpong --stream cuda --via magic", 2, "--via|magic|memop, kernel or auto"),
    ("pingpong --via memop", 1, "--via is for --stream cuda"),
    ("pingpong --device 0", 1, "--device is for"),
    ("pingpong --payload device", 2, "--payload|device|host, gpu, near"),
    ("pingpong --kernel-us 5 --no-kernels", 1, "--kernel-us|--no-kernels"),
    ("pingpong --sideways", 2, "--sideways"),
    ("GDSYNC_FAULTS=nonsense pingpong", 1, "GDSYNC_FAULTS is 'nonsense'|drop=P"),
    ("GDSYNC_FAULTS=seed=1,drop=2 pingpong", 1, "GDSYNC_FAULTS is 'seed=1,drop=2'|drop probability is 2"),
    ("MP_BIND=maybe pingpong", 1, "MP_BIND|'maybe'|0 or 1"),
    ("GDSYNC_STRICT=maybe pingpong", 1, "GDSYNC_STRICT is 'maybe'|0 or 1"),
    ("GDSYNC_DEVICE=mlx5_7 pingpong", 1, "mlx5_7|soft0|GDSYNC_DEVICE"),
    ("RANK=0 pingpong", 1, "WORLD_SIZE is not set"),
    ("jacobi2d --nx 0", 2, "--nx"),
    ("jacobi2d --ny 65537", 2, "--ny|65537"),
    ("jacobi2d --iters 0", 2, "--iters"),
    ("jacobi2d --ahead 201", 2, "--ahead"),
    ("jacobi2d --ranks 0", 2, "--ranks"),
    ("jacobi2d --mode cpu", 2, "--mode|stream, graph, sync"),
    ("jacobi2d --ranks 3 --ny 2 --nx 2", 1, "--ny 2|3 ranks need a row each"),
    ("jacobi2d --via memop", 1, "--via is for --stream cuda"),
    ("producer_consumer --slots 0", 2, "--slots"),
    ("sendrecv --stream", 2, "--stream|Usage: sendrecv"),
    ("ring --stream", 2, "--stream|Usage: ring"),
    ("putget --stream", 2, "--stream|Usage: putget"),
    ("mapping --stream", 2, "--stream|Usage: mapping"),
    ("gdrcopy_copybw --backend host --nonsense", 2, "--nonsense"),
    ("gdrcopy_copybw --backend host -s 12X", 2, "--size"),
    ("gdrcopy_copybw --backend host -s 0", 2, "-s"),
    ("gdrcopy_copybw --backend host -c 4M", 2, "131072"),
    ("gdrcopy_copybw --backend host -o 128K", 2, "131072"),
    ("gdrcopy_copybw --backend host -w 0", 2, "--writes"),
    ("gdrcopy_copybw --backend host -a malloc", 2, "cuMemCreate"),
    ("gdrcopy_copybw --backend host -M warm", 2, "device"),
    ("gdrcopy_copybw --backend cloud", 2, "gdrdrv, dmabuf, rm or host"),
    ("gdrcopy_copybw --backend host -M wc", 1, "WriteCombining"),
    ("gdrcopy_copybw --backend host -d 7", 2, "no GPU 7"),
    ("gdrcopy_copybw --backend host --json -", 1, "name a file"),
    ("gdrcopy_copybw --backend host --json /dev/full", 1, "--json /dev/full: No space left on device"),
    ("gdrcopy_copylat --backend host -s 0", 2, "-s"),
    ("gdrcopy_copylat --backend host -c", 1, "need a GPU"),
    ("gdrcopy_copylat --backend host -C", 1, "need a GPU"),
    ("gdrcopy_apiperf --backend host -s 4096", 2, "65536"),
    ("gdrcopy_apiperf --backend host -n 0", 2, "--iterations"),
    ("gdrcopy_pplat --backend host", 1, "pplat needs a GPU"),
    ("gdrcopy_pplat --backend host -s 3", 2, "multiple of 4"),
    ("gdrcopy_pplat --backend host -m 2", 2, "--mode"),
    ("gdrcopy_pplat --backend host -G disk", 2, "hostmem"),
    ("gdrcopy_pplat --backend host --flush", 2, "--flush"),
    ("gdrcopy_sanity --backend host -t no_such_case", 2, "no_such_case"),
    ("gdrcopy_sanity --backend host --threads 0", 2, "--threads"),
    ("gdrcopy_sanity --backend host -d 9", 2, "no GPU 9"),
];

#[track_caller]
fn errs(line: &str, status: i32, words: &str) {
    let (output, out, err) = run(command(line));
    assert_eq!(output.status.code(), Some(status), "{line}: {out}{err}");
    assert!(words.split('|').all(|word| err.contains(word)), "{line}: {err}");
    assert!(!err.contains("panicked") && (status == 1 || out.is_empty()), "{line}: {out}{err}");
}

#[test]
fn errors_name_what_is_wrong() {
    ERRORS.iter().for_each(|(line, status, words)| errs(line, *status, words));
    for kind in ["latency", "bandwidth", "messages", "copy", "trigger", "stream", "scale"] {
        errs(&format!("gdasync bench {kind} --json {NOWHERE}"), 1, &format!("--json|{NOWHERE}"));
    }
    for (line, status) in [
        ("gdasync doctor", 2),
        ("pingpong --sizes 8 --iters 2 --modes cpu", 1),
        ("jacobi2d --nx 2 --ny 2", 1),
        ("gdrcopy_copybw --backend host", 1),
    ] {
        errs(&format!("{line} --json {NOWHERE}"), status, &format!("--json|{NOWHERE}|No such file"));
    }
    for line in ["gdasync plot benchmarks/stream-h200.json", "gdasync report benchmarks/stream-h200.json"] {
        errs(&format!("{line} -o {NOWHERE}"), 1, NOWHERE);
    }
    if !std::path::Path::new("/dev/gdrdrv").exists() {
        for tool in ["copybw", "copylat", "apiperf", "pplat", "sanity"] {
            let words = "GPU memory cannot be mapped here|gdrdrv";
            errs(&format!("gdrcopy_{tool} --backend gdrdrv"), 1, words);
        }
    }
}

/// What prints, with little to do: the examples, benchmarks and tools.
const PRINTING: [&str; 11] = [
    "mapping",
    "putget",
    "sendrecv",
    "producer_consumer --blocks 20",
    "pingpong --sizes 8 --iters 20 --modes cpu",
    "jacobi2d --nx 16 --ny 16 --iters 20",
    "gdasync bench latency --sizes 8 --iters 20 --ahead 10",
    "gdasync bench messages --sizes 8 --iters 20 --calls 20",
    "gdasync gdrcopy copylat --backend host -s 64",
    "gdasync doctor --only limits",
    "gdasync doctor --list",
];

#[test]
fn output_that_cannot_be_written_is_an_error() {
    for line in PRINTING {
        let mut command = command(line);
        command.stdout(File::options().write(true).open("/dev/full").unwrap());
        let (output, _, err) = run(command);
        assert_eq!(output.status.code(), Some(if line.contains("doctor") { 2 } else { 1 }), "{line}: {err}");
        assert_eq!(err.lines().count(), 1, "{line}: {err}");
        assert!(err.contains("cannot write the output: No space left on device"), "{line}: {err}");
    }
    for name in ["pingpong", "jacobi2d", "producer_consumer"] {
        // A launcher that is not there, and nobody to tell it to.
        let mut command = command(&format!("RANK=1 WORLD_SIZE=two {name}"));
        command.stderr(File::options().write(true).open("/dev/full").unwrap());
        assert_eq!(run(command).0.status.code(), Some(1), "{name}");
    }
}

#[test]
fn reader_that_has_seen_enough_is_no_failure() {
    for line in PRINTING {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = command(line);
        command.stdout(writer);
        let (output, _, err) = run(command);
        assert!(output.status.success(), "{line}: {output:?}");
        assert_eq!(err, "", "{line}");
    }
}
