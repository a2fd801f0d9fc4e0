use std::thread;

use super::*;

/// Generous: reached only by a test that fails.
const LONG: Duration = Duration::from_secs(60);

/// Runs a session against a launcher that answers line for line; returns what it was told too.
fn played(root: Option<&str>, answers: &[&str], limit: Duration) -> (Result<(String, u64)>, Vec<String>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        let launcher = scope.spawn(move || {
            let mut lines = BufReader::new(&theirs).lines();
            let mut told = Vec::new();
            for answer in answers {
                told.push(lines.next().unwrap().unwrap());
                (&theirs).write_all(answer.as_bytes()).unwrap();
            }
            // Only a deadline may end a session that gets no answer.
            if limit < LONG {
                told.extend(lines.next().map(|line| line.unwrap()));
                lines.next();
            }
            told
        });
        let found = talk(&ours, root, &Deadline::after(limit));
        drop(ours);
        (found, launcher.join().unwrap())
    })
}

const ANSWERS: [&str; 6] = [
    "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n",
    "cmd=my_kvsname kvsname=kvs_1_0_99_host\n",
    "cmd=put_result rc=0 msg=success\n",
    "cmd=barrier_out\n",
    "cmd=get_result rc=0 msg=success value=[::1]:20\n",
    "cmd=finalize_ack\n",
];

#[test]
fn a_session_word_for_word() {
    let (found, told) = played(Some("[::1]:20"), &ANSWERS, LONG);
    assert_eq!(found.unwrap(), ("[::1]:20".to_owned(), hash("kvs_1_0_99_host")));
    let expected = [
        "cmd=init pmi_version=1 pmi_subversion=1",
        "cmd=get_my_kvsname",
        "cmd=put kvsname=kvs_1_0_99_host key=gdsync-root value=[::1]:20",
        "cmd=barrier_in",
        "cmd=get kvsname=kvs_1_0_99_host key=gdsync-root",
        "cmd=finalize",
    ];
    assert_eq!(told, expected);
    let others = [ANSWERS[0], ANSWERS[1], ANSWERS[3], ANSWERS[4], ANSWERS[5]];
    let (found, told) = played(None, &others, LONG);
    assert_eq!(found.unwrap().0, "[::1]:20");
    assert!(!told.iter().any(|line| line.contains("put")), "{told:?}");
}

#[test]
fn bad_answers_are_reported() {
    for (at, answer, expected) in [
        (0, "cmd=response_to_init pmi_version=2 rc=-1\n", "rc=-1' to 'init"),
        (0, "nonsense\n", "answered 'nonsense', without cmd"),
        (1, "cmd=my_kvsname\n", "without kvsname"),
        (1, "cmd=barrier_out\n", "answered 'cmd=barrier_out' to 'get_my_kvsname'"),
        (4, "cmd=get_result rc=-1 msg=key_not_found value=unknown\n", "key_not_found"),
        (3, "cmd=barr", "closed the connection in barrier_in"),
    ] {
        let mut answers = ANSWERS[..=at].to_vec();
        answers[at] = answer;
        let (found, _) = played(Some("[::1]:20"), &answers, LONG);
        let error = found.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Bootstrap { .. }) && text.contains(expected), "{text}");
        assert!(text.contains("set MASTER_ADDR"), "{text}");
    }
}

#[test]
fn a_silent_launcher_runs_into_the_deadline() {
    let (found, told) = played(None, &ANSWERS[..2], Duration::from_millis(100));
    let error = found.unwrap_err();
    assert!(matches!(error, Error::Deadline { .. }), "{error}");
    assert!(error.to_string().contains("barrier_in"), "{error}");
    assert_eq!(told.last().unwrap(), "cmd=barrier_in");
}

#[test]
fn bad_descriptors_are_reported() {
    for fd in [-1, 1_000_000] {
        let error = duplicate(fd).unwrap_err().to_string();
        assert!(
            error.contains(&format!("PMI_FD is {fd}")) && error.contains("Bad file descriptor"),
            "{error}"
        );
    }
}

#[test]
fn the_address_is_what_others_dial() {
    for (host, expected) in [("127.0.0.1", "127.0.0.1:"), ("::1", "[::1]:"), ("node-7", "node-7:")] {
        match listen_at(Some(host)) {
            Ok((listener, root)) => {
                let port = address(&listener).unwrap().port();
                assert_eq!(root, format!("{expected}{port}"));
                assert_eq!(address(&listener).unwrap().ip().is_loopback(), host != "node-7");
            }
            // A machine without IPv6.
            Err(error) => assert_eq!(host, "::1", "{error}"),
        }
    }
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert!(listen_at(None).unwrap().1.starts_with(&format!("{}:", name.trim())));
}

#[test]
fn symbols_are_found_where_they_are() {
    assert!(symbol(c"getpid"));
    assert!(!symbol(c"MPI_Init"));
}

#[test]
fn a_dripping_launcher_does_not_extend_the_deadline() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        // Until the other side has given up.
        scope.spawn(move || {
            while (&theirs).write_all(b"c").is_ok() {
                thread::sleep(Duration::from_millis(1))
            }
        });
        let error = talk(&ours, None, &Deadline::after(Duration::from_millis(100))).unwrap_err();
        drop(ours);
        assert!(error.to_string().contains("init"), "{error}");
    });
}

#[test]
fn a_line_without_an_end_is_refused() {
    let (found, _) = played(None, &[&"c".repeat(MAX_LINE + 1)], LONG);
    let error = found.unwrap_err().to_string();
    assert!(error.contains("65536 bytes"), "{error}");
}
