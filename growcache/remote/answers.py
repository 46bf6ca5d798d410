"""What a store's refusal means, as one line a person can act on. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from growcache.errors import (
    AccessError,
    CredentialsError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    StoreMissingError,
    TransientStoreError,
)
from growcache.usercode import short

_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_REGION = re.compile(r"<Region>([\w-]+)</Region>|expecting '([\w-]+)'")
UNTRUSTED = "its TLS certificate is not trusted"
UNRESOLVED, REFUSED, LATE = "unknown host", "connection refused", "no answer in time"
RESET = "connection reset"
_CAUSES = (
    ("invalid list response", "its listing cannot be read: it is not what S3's API answers"),
    ("dns error", UNRESOLVED),
    ("ConnectionRefused", REFUSED),
    ("InvalidCertificate", UNTRUSTED),
    ("TimedOut", LATE),
    ("timed out", LATE),
    ("ConnectionReset", RESET),
    ("IncompleteMessage", "connection broken off"),
    ("UnexpectedEof", "connection broken off"),
    ("error following redirect", "it redirects again and again"),
    ("Connect", "no connection"),
    ("Parse(", "its answer is no HTTP"),
)
NO_CREDENTIALS = "no credentials that hold are found"
_PROVIDER = re.compile(r"credential provider: (\w+(?:: [^\n]*)?)")
_ADDRESS = re.compile(r"Error performing [A-Z]+ https?://(?:[^/@\s]*@)?([^/?#\s]+)")

_AMAZON = (
    "key and secret in source.storage_options, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)
_AZURE = (
    "account_name and account_key (or sas_token) in source.storage_options, or "
    "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
)
_GOOGLE = "token in source.storage_options, or GOOGLE_APPLICATION_CREDENTIALS"
_WEB = "user and password in source.url, or client_kwargs: {headers: …}"
_GIVEN = {
    **dict.fromkeys(("s3", "s3a"), _AMAZON),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), _AZURE),
    **dict.fromkeys(("gs", "gcs"), _GOOGLE),
    **dict.fromkeys(("http", "https"), _WEB),
}
_WRONG_KEY = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "AuthenticationFailed"}
)
_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired",
     "ExpiredAuthenticationToken"}
)  # fmt: skip
_ELSEWHERE = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "TemporaryRedirect"}
)
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"})
_TRANSIENT_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable"}
)


class UnnameableKeyError(StoreError):
    """A key that is legal in the store and not for the client."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A failed attempt, as far as the client tells.

    Attributes:
        kind: the client's name of the failure, as a last resort.
        status: HTTP status; None where no answer came.
        code: the store's own word, as in S3's ``<Code>``; or what the chain of credentials says.
        cause: in plain words, why there was no answer.
        region: where the bucket is, if the store says so.
        address: host and port that were asked.
    """

    kind: str
    status: int | None = None
    code: str = ""
    cause: str = ""
    region: str = ""
    address: str = ""


def read_answer(error: Exception) -> Answer:
    """Return what an obstore error says. Its text may hold signed URLs, so it is never shown."""
    text = str(error)
    found = _STATUS.search(text)
    status = int(found[1] or found[2]) if found else None
    if status is None and isinstance(error, FileNotFoundError):
        status = 404
    if provider := _PROVIDER.search(text):
        return Answer(type(error).__name__, code=short(provider[1]), cause=NO_CREDENTIALS)
    code, region, address = _CODE.search(text), _REGION.search(text), _ADDRESS.search(text)
    cause = next((words for sign, words in _CAUSES if sign in text), "")
    return Answer(
        type(error).__name__,
        status,
        code[1] if code else "",
        cause,
        (region[1] or region[2]) if region else "",
        address[1] if address else "",
    )


def explain(answer: Answer, root: str, key: str, option: str = "") -> StoreError:
    """Return the error of growcache that an answer means.

    What is refused may be one key, or all of them: where the store's own word does not tell, the
    error is about the key, and `refusals` asks for evidence.

    Args:
        answer: the failed attempt.
        root: of the store, as ``s3://bucket/``.
        key: of the object; empty for a listing.
        option: the setting that says which server is asked; empty where none does.
    """
    where = f"{root}{key}"
    store = root.rstrip("/")
    said = " ".join(filter(None, (str(answer.status or ""), answer.code)))
    if answer.code in _NO_BUCKET or (answer.status == 404 and not key):
        asked = f" ({answer.address})" if answer.address else ""
        check = f"the bucket in source.url and {option or 'the endpoint_url'}{asked}"
        return StoreMissingError(f"{store} does not exist; check {check}")
    if answer.status in (404, 410):
        return ObjectMissingError(f"{where} does not exist ({said})")
    if answer.status in (412, 416) or answer.kind == "PreconditionError":
        return ObjectChangedError(f"{where} was rewritten since it was listed ({said})")
    if answer.code in _ELSEWHERE or answer.status in (301, 307):
        region = answer.region or "ITS-REGION"
        return CredentialsError(
            f"{store} is in another region ({said}); set source.storage_options to "
            f"{{client_kwargs: {{region_name: {region}}}}}"
        )
    if answer.cause == NO_CREDENTIALS:
        return CredentialsError(
            f"{store}: {NO_CREDENTIALS} ({answer.code}); check {_credentials(store)}"
        )
    if answer.cause == UNTRUSTED:
        file = "SSL_CERT_FILE"
        if store.startswith("s3"):
            file = "source.storage_options: {client_kwargs: {verify: FILE}}"
        return CredentialsError(
            f"{store}: {UNTRUSTED}; check the address, or name the file with the certificate of "
            f"its authority in {file}"
        )
    if (refusal := _refusal(answer, store, where if key else "", said)) is not None:
        return refusal
    if answer.kind == "InvalidPathError":
        return UnnameableKeyError(
            f"{where} holds a key that obstore cannot name (with //, a control character, or . "
            "and .. as a component); use source.client: auto or fsspec"
        )
    if answer.status is None or answer.status >= 500 or answer.status in (408, 425, 429):
        return TransientStoreError(f"{where}: {said or _no_answer(answer, option)}")
    if answer.code in _TRANSIENT_CODES:
        return TransientStoreError(f"{where}: {said}")
    return StoreError(f"{where}: the store answered {said}")


def _refusal(answer: Answer, store: str, where: str, said: str) -> AccessError | None:
    """Return the refusal that an answer is, where it is about who asks.

    Args:
        answer: the failed attempt.
        store: that was asked.
        where: the object; empty for a listing.
        said: status and code.
    """
    # The answer to a request for one key need not be about the others.
    kind: type[AccessError] = AccessError if where else CredentialsError
    if answer.code in _WRONG_KEY:
        kind, where = CredentialsError, ""
    if answer.code in _WRONG_KEY or answer.status == 401:
        return kind(
            f"{where or store} refuses the credentials ({said}); check {_credentials(store)}"
        )
    if answer.code in _EXPIRED:
        return CredentialsError(f"{store}: the credentials have expired ({said}); renew them")
    if answer.code == "RequestTimeTooSkewed":
        return CredentialsError(f"{store} refuses this machine's clock ({said}); set it right")
    if answer.status == 403 or answer.kind in _DENIED:
        return kind(
            f"{where or store} may not be read with these credentials ({said or answer.kind}); "
            "they need to list and get, or anon: true in source.storage_options for a public "
            "bucket"
        )
    return None


_DENIED = ("PermissionDeniedError", "UnauthenticatedError")


def _no_answer(answer: Answer, option: str) -> str:
    """Return why there was no answer, whom that is said of, and where that is set."""
    cause = answer.cause or answer.kind
    if not answer.address:
        return cause
    by = _PREPOSITIONS.get(cause, " from ")
    return f"{cause}{by}{answer.address}" + (f" ({option})" if option else "")


_PREPOSITIONS = {REFUSED: " by ", RESET: " by ", UNRESOLVED: " ", LATE: " from "}


def _credentials(store: str) -> str:
    """Return where the credentials of a store are given."""
    return _GIVEN.get(store.partition("://")[0], "source.storage_options")
