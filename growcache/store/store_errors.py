"""Turn a client library's exception into a one-line error that says what to do. Pure."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from growcache.errors import (
    AccessError,
    CredentialsError,
    ErrorCode,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    StoreMissingError,
    TransientStoreError,
)
from growcache.usercode import short_key

_STATUS_PATTERN = re.compile(r"status code: (\d{3})|status: (\d{3})")
_CODE_PATTERN = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_REGION_PATTERN = re.compile(r"<Region>([\w-]+)</Region>|expecting '([\w-]+)'")
UNTRUSTED_CERTIFICATE = "its TLS certificate is not trusted"
UNKNOWN_HOST, TIMED_OUT = "unknown host", "no answer in time"
CONNECTION_REFUSED, CONNECTION_RESET = "connection refused", "connection reset"
_OBSTORE_CAUSES = (
    ("invalid list response", "its listing cannot be read: it is not what S3's API answers"),
    ("dns error", UNKNOWN_HOST),
    ("ConnectionRefused", CONNECTION_REFUSED),
    ("InvalidCertificate", UNTRUSTED_CERTIFICATE),
    ("TimedOut", TIMED_OUT),
    ("timed out", TIMED_OUT),
    ("ConnectionReset", CONNECTION_RESET),
    ("IncompleteMessage", "connection broken off"),
    ("UnexpectedEof", "connection broken off"),
    ("error following redirect", "it redirects again and again"),
    ("Connect", "no connection"),
    ("Parse(", "its answer is not HTTP"),
)
NO_CREDENTIALS = "no valid credentials are found"
_PROVIDER_PATTERN = re.compile(r"credential provider: (\w+(?:: [^\n]*)?)")
_ADDRESS_PATTERN = re.compile(r"Error performing [A-Z]+ https?://(?:[^/@\s]*@)?([^/?#\s]+)")

_AMAZON_CREDENTIALS = (
    "key and secret in source.storage_options, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)
_AZURE_CREDENTIALS = (
    "account_name and account_key (or sas_token) in source.storage_options, or "
    "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
)
_GOOGLE_CREDENTIALS = "token in source.storage_options, or GOOGLE_APPLICATION_CREDENTIALS"
_WEB_CREDENTIALS = "user and password in source.url, or client_kwargs: {headers: …}"
_WHERE_CREDENTIALS_ARE_SET = {
    **dict.fromkeys(("s3", "s3a"), _AMAZON_CREDENTIALS),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), _AZURE_CREDENTIALS),
    **dict.fromkeys(("gs", "gcs"), _GOOGLE_CREDENTIALS),
    **dict.fromkeys(("http", "https"), _WEB_CREDENTIALS),
}
_WRONG_KEY_CODES = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "AuthenticationFailed"}
)
_EXPIRED_CODES = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired",
     "ExpiredAuthenticationToken"}
)  # fmt: skip
_OTHER_REGION_CODES = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "TemporaryRedirect"}
)
_NO_BUCKET_CODES = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"})
_TRANSIENT_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable"}
)


LONGEST_RETRY_AFTER_SECONDS = 300.0
_THROTTLING_STATUSES = frozenset({429, 503, 504})
_THROTTLING_CODES = frozenset({"SlowDown", "RequestTimeout"})


class UnsupportedKeyError(StoreError):
    """A key that the store allows, but the client does not."""

    code: ErrorCode = "GC216"


@dataclass(frozen=True, slots=True)
class FailedRequest:
    kind: str  # the client's name for the failure, as a last resort
    status: int | None = None  # of HTTP; None without an answer
    code: str = ""  # such as S3's <Code>, or the reason from the chain of credentials
    cause: str = ""  # why no answer came, in plain words
    region: str = ""  # of the bucket, if the store tells it
    address: str = ""  # host and port of the request
    retry_after: float = 0.0  # seconds, from the header; obstore does not show it


def read_obstore_error(error: Exception) -> FailedRequest:
    """Reduce an obstore error. Its text is never shown, because it may have signed URLs."""
    text = str(error)
    found = _STATUS_PATTERN.search(text)
    status = int(found[1] or found[2]) if found else None
    if status is None and isinstance(error, FileNotFoundError):
        status = 404
    if provider := _PROVIDER_PATTERN.search(text):
        return FailedRequest(
            type(error).__name__, code=short_key(provider[1]), cause=NO_CREDENTIALS
        )
    cause = next((words for sign, words in _OBSTORE_CAUSES if sign in text), "")
    code, region, address = (
        next(filter(None, found.groups()), "") if (found := pattern.search(text)) else ""
        for pattern in (_CODE_PATTERN, _REGION_PATTERN, _ADDRESS_PATTERN)
    )
    return FailedRequest(type(error).__name__, status, code, cause, region, address)


def store_error(answer: FailedRequest, root: str, key: str, option: str = "") -> StoreError:
    """Return growcache's error for an answer.

    Without a decisive code from the store, a refusal counts as one of the key, and
    `retries.StoreProbe` decides.
    """
    where = f"{root}{key}"
    store = root.rstrip("/")
    said = " ".join(filter(None, (str(answer.status or ""), answer.code)))
    if answer.code in _NO_BUCKET_CODES or (answer.status == 404 and not key):
        asked = f" ({answer.address})" if answer.address else ""
        check = f"the bucket in source.url and {option or 'the endpoint_url'}{asked}"
        return StoreMissingError(f"{store} does not exist; check {check}")
    if answer.status in (404, 410):
        return ObjectMissingError(f"{where} does not exist ({said})")
    if answer.status in (412, 416) or answer.kind == "PreconditionError":
        return ObjectChangedError(f"{where} was rewritten since it was listed ({said})")
    if answer.code in _OTHER_REGION_CODES or answer.status in (301, 307):
        region = answer.region or "ITS-REGION"
        return CredentialsError(
            f"{store} is in another region ({said}); set source.storage_options to "
            f"{{client_kwargs: {{region_name: {region}}}}}",
            code="GC208",
        )
    if answer.cause == NO_CREDENTIALS:
        return CredentialsError(
            f"{store}: {NO_CREDENTIALS} ({answer.code}); check {_where_credentials_are_set(store)}"
        )
    if answer.cause == UNTRUSTED_CERTIFICATE:
        file = "SSL_CERT_FILE"
        if store.startswith("s3"):
            file = "source.storage_options: {client_kwargs: {verify: FILE}}"
        return CredentialsError(
            f"{store}: {UNTRUSTED_CERTIFICATE}; check the address, or name the file with the certificate of "
            f"its authority in {file}",
            code="GC207",
        )
    if (refusal := _access_error(answer, store, where if key else "", said)) is not None:
        return refusal
    if answer.kind == "InvalidPathError":
        return UnsupportedKeyError(
            f"{where} holds a key that obstore cannot name (with //, a control character, or . "
            "and .. as a component); use source.client: auto or fsspec"
        )
    if answer.status is None or answer.status >= 500 or answer.status in (408, 425, 429):
        return _transient_error(f"{where}: {said or _no_answer_text(answer, option)}", answer)
    if answer.code in _TRANSIENT_CODES:
        return _transient_error(f"{where}: {said}", answer)
    return StoreError(f"{where}: the store answered {said}")


def _transient_error(text: str, answer: FailedRequest) -> TransientStoreError:
    error = TransientStoreError(text)
    error.status = answer.status
    error.throttled = (
        answer.status in _THROTTLING_STATUSES
        or answer.code in _THROTTLING_CODES
        or answer.cause == TIMED_OUT
    )
    error.retry_after = answer.retry_after
    return error


def _access_error(
    answer: FailedRequest, store: str, where: str, said: str
) -> AccessError | None:
    # The answer about one key may not apply to others.
    kind: type[AccessError] = AccessError if where else CredentialsError
    if answer.code in _WRONG_KEY_CODES:
        kind, where = CredentialsError, ""
    if answer.code in _WRONG_KEY_CODES or answer.status == 401:
        return kind(
            f"{where or store} refuses the credentials ({said}); check {_where_credentials_are_set(store)}"
        )
    if answer.code in _EXPIRED_CODES:
        return CredentialsError(
            f"{store}: the credentials have expired ({said}); renew them", code="GC205"
        )
    if answer.code == "RequestTimeTooSkewed":
        return CredentialsError(
            f"{store} refuses this machine's clock ({said}); correct it", code="GC206"
        )
    if answer.status == 403 or answer.kind in _ACCESS_DENIED_KINDS:
        return kind(
            f"{where or store} may not be read with these credentials ({said or answer.kind}); "
            "they need to list and get, or anon: true in source.storage_options for a public "
            "bucket"
        )
    return None


_ACCESS_DENIED_KINDS = ("PermissionDeniedError", "UnauthenticatedError")


def _no_answer_text(answer: FailedRequest, option: str) -> str:
    cause = answer.cause or answer.kind
    if not answer.address:
        return cause
    by = _PREPOSITIONS.get(cause, " from ")
    return f"{cause}{by}{answer.address}" + (f" ({option})" if option else "")


_PREPOSITIONS = {CONNECTION_REFUSED: " by ", CONNECTION_RESET: " by ", UNKNOWN_HOST: " "}


def _where_credentials_are_set(store: str) -> str:
    return _WHERE_CREDENTIALS_ARE_SET.get(store.partition("://")[0], "source.storage_options")


_CAUSES_BY_ERRNO = {
    errno.ECONNREFUSED: CONNECTION_REFUSED,
    errno.ECONNRESET: CONNECTION_RESET,
    errno.EPIPE: CONNECTION_RESET,
    errno.ETIMEDOUT: TIMED_OUT,
    errno.EHOSTUNREACH: "no route to host",
    errno.ENETUNREACH: "network unreachable",
}
_MOST_CAUSES = 8  # in a chain of causes


def connection_failure(error: BaseException) -> tuple[str, str]:
    causes = list(_chain_of_causes(error))
    cause = next(filter(None, map(_cause_text, causes)), "")
    address = next(filter(None, map(_address_of_error, causes)), "")
    words = getattr(error, "strerror", None) or type(error).__name__
    return cause or f"no answer ({words})", address


def credentials_failure(error: BaseException) -> str | None:
    for one in _chain_of_causes(error):
        if type(one).__name__ in _CREDENTIALS_EXCEPTIONS:
            said = " ".join(str(one).split())
            return short_key(f"{type(one).__name__}: {said}" if said else type(one).__name__)
    return None


# botocore, google-auth and azure-identity raise these before any request.
_CREDENTIALS_EXCEPTIONS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError",
     "TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError", "SSOError",
     "ProfileNotFound", "RefreshWithMFAUnsupportedError", "MetadataRetrievalError",
     "LoginRefreshRequired", "RefreshError", "DefaultCredentialsError",
     "CredentialUnavailableError", "ClientAuthenticationError"}
)  # fmt: skip


def _chain_of_causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if found is None:
            return
        yield found
        kept = getattr(found, "inner_exception", None)  # Azure's
        found = (
            kept if isinstance(kept, BaseException) else found.__cause__ or found.__context__
        )


def _cause_text(error: BaseException) -> str:
    if isinstance(error, socket.gaierror):
        return UNKNOWN_HOST
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return TIMED_OUT
    return _CAUSES_BY_ERRNO.get(getattr(error, "errno", None) or 0, "")


def _address_of_error(error: BaseException) -> str:
    host, port = getattr(error, "host", None), getattr(error, "port", None)
    if isinstance(host, str) and isinstance(port, int):
        return f"{host}:{port}"
    kept = getattr(error, "kwargs", None)
    url = kept.get("endpoint_url") if isinstance(kept, dict) else None
    return urlsplit(url).netloc.rpartition("@")[2] if isinstance(url, str) else ""


def read_fsspec_error(error: BaseException) -> FailedRequest:
    """Reduce an exception of an fsspec client. s3fs has botocore's as its cause."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if isinstance(response, Mapping):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(response.get("Error", {}).get("Code", ""))
        region = str(response.get("Error", {}).get("Region", ""))
        if code.isdigit():  # answers to HEAD have no body, and so no word
            status, code = int(code), ""
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        after = retry_after_seconds(headers)
        return FailedRequest(
            type(error).__name__, status, code, region=region, retry_after=after
        )
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int) and 300 <= status < 600:
            after = retry_after_seconds(getattr(error, "headers", None))
            return FailedRequest(type(error).__name__, status, retry_after=after)
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause and is_client_error(cause):
        # fsspec's HTTP client calls any failure of HEAD and GET "not found".
        return read_fsspec_error(cause)
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return FailedRequest(type(error).__name__, 404)
    if isinstance(error, PermissionError):
        return FailedRequest(type(error).__name__, 403)
    if (words := credentials_failure(error)) is not None:
        return FailedRequest(type(error).__name__, code=words, cause=NO_CREDENTIALS)
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return FailedRequest(type(error).__name__, cause=UNTRUSTED_CERTIFICATE)
    words, address = connection_failure(error)
    return FailedRequest(type(error).__name__, cause=words, address=address)


def retry_after_seconds(headers: object) -> float:
    """Return the seconds that a Retry-After header asks for, or 0 without one.

    A date is relative to the answer's own Date, because clocks differ. No wait is longer than
    five minutes.

    >>> retry_after_seconds({"retry-after": "3"}), retry_after_seconds({"Retry-After": "soon"})
    (3.0, 0.0)
    >>> date, later = "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:09 GMT"
    >>> retry_after_seconds({"retry-after": later, "date": date})
    9.0
    """
    said = _header(headers, "Retry-After")
    if said.isdecimal():
        return min(float(said), LONGEST_RETRY_AFTER_SECONDS)
    until, now = _seconds_of_date(said), _seconds_of_date(_header(headers, "Date"))
    if until is None or now is None:
        return 0.0
    return min(max(0.0, until - now), LONGEST_RETRY_AFTER_SECONDS)


def _header(headers: object, name: str) -> str:
    if not isinstance(headers, Mapping):
        return ""
    return str(headers.get(name.lower()) or headers.get(name) or "").strip()


def _seconds_of_date(said: str) -> float | None:
    try:
        return parsedate_to_datetime(said).timestamp()
    except (ValueError, OverflowError):
        return None


def is_client_error(error: BaseException) -> bool:
    return isinstance(error, OSError) or type(error).__module__ != "builtins"
